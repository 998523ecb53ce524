// Planted faults, for tests of the emulation: under how many orders of the threads a fault shows, or how it ends a child process.
#ifndef PLANTED_H
#define PLANTED_H

#include <sys/wait.h>

#include "gpt/cuda.cuh"
#include "tests/frame.h"

// Does `right(i)` hold for each i from 0 to end - 1?
template <typename Right> static bool all_right(int end, Right right) {
    for (int i = 0; i < end; i++)
        if (!right(i)) return false;
    return true;
}

// How many of ten orders of the threads give a wrong answer.
template <typename Right> static int wrong_orders(Right right) {
    uint64_t given = cuda_on_cpu::seed;
    int wrong = 0;
    for (unsigned i = 0; i < 10; i++) {
        cuda_on_cpu::seed = given * 1000 + i;
        wrong += !right();
    }
    cuda_on_cpu::seed = given;
    return wrong;
}

// Runs `body` in a forked child. Returns its exit code, or 1000 + signal; `child_said` is what it wrote to stderr.
static char child_said[8192];
template <typename Body> static int exit_of(Body body) {
    FILE *file = tmpfile();
    CHECK(file);
    fflush(NULL);
    pid_t child = fork();
    CHECK(child >= 0);
    if (child == 0) {
        in_child = true;
        dup2(fileno(file), 2);
        alarm(60);
        body();
        _exit(0);
    }
    int status;
    CHECK(waitpid(child, &status, 0) == child);
    rewind(file);
    child_said[fread(child_said, 1, sizeof child_said - 1, file)] = 0;
    fclose(file);
    return WIFEXITED(status) ? WEXITSTATUS(status) : 1000 + WTERMSIG(status);
}

#define CHECK_SAID(text) CHECK(strstr(child_said, text), "it said: %.600s", child_said)

// The statement ends a child with an error, and with this message.
#define CHECK_ENDS(text, ...)                                                    \
    do {                                                                         \
        CHECK(exit_of([=] { __VA_ARGS__; }) != 0, "it said: %.600s", child_said); \
        CHECK_SAID(text);                                                        \
    } while (0)

#endif
