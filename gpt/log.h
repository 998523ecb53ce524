// What a run says: short lines for the terminal, and log.jsonl with one object a line and full-precision numbers.
#ifndef GPT_LOG_H
#define GPT_LOG_H

#include <errno.h>
#include <fcntl.h>
#include <math.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

#include "json.h"

// A name for putting `path` aside: with `ending`, and a number if that is taken. `aside` has room for PATH_SIZE + 32.
static inline const char *name_aside(const char *path, const char *ending, char *aside) {
    snprintf(aside, PATH_SIZE + 32, "%s.%s", path, ending);
    for (int n = 2; !access(aside, F_OK); n++) snprintf(aside, PATH_SIZE + 32, "%s.%s-%d", path, ending, n);
    return aside;
}

static inline double seconds_now(void) {
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return (double)now.tv_sec + 1e-9 * (double)now.tv_nsec;
}

typedef struct {
    int jsonl;            // file descriptor
    bool terminal;        // stdout is one: lines are updated in place between reports
    bool in_place;        // the cursor stands on a line that the next one replaces
    long long every;      // keep a step's line every so many steps
    long long first, steps;  // steps done before this run, and when it ends
    double start;         // when the first step began, for the time left
} Log;

// Opens folder/log.jsonl for a run that goes on after `step`. Lines of later steps, which a crash can leave behind, are cut
// off, so that the log reads as one run. At step 0 a log that is there becomes log.jsonl.old. False after fail().
static inline bool log_open(Log *log, const char *folder, long long step, long long steps, long long every) {
    char path[PATH_SIZE], aside[PATH_SIZE + 32], *line = NULL;
    size_t room = 0;
    snprintf(path, sizeof path, "%s/log.jsonl", folder);
    if (step == 0) rename(path, name_aside(path, "old", aside));
    FILE *file = fopen(path, "a+");
    if (!file) return fail("cannot write %s: %s; choose another --out", path, strerror(errno));
    off_t keep = 0;
    rewind(file);
    while (getline(&line, &room, file) >= 0) {
        const char *found = strstr(line, "\"step\": ");
        if (!strchr(line, '\n') || (found && strtoll(found + 8, NULL, 10) > step)) break;
        keep = ftello(file);
    }
    free(line);
    fclose(file);
    log->jsonl = open(path, O_WRONLY | O_APPEND | O_CLOEXEC);
    if (log->jsonl < 0 || ftruncate(log->jsonl, keep)) return fail("cannot shorten %s: %s", path, strerror(errno));
    log->terminal = isatty(STDOUT_FILENO);
    log->in_place = false;
    log->every = every;
    log->first = step;
    log->steps = steps;
    log->start = seconds_now();
    return true;
}

// Ends a line that would be replaced, so that other output can follow.
static inline void log_break(Log *log) {
    if (log->in_place) putchar('\n');
    log->in_place = false;
}

// Adds a line to log.jsonl, or nothing. Training goes on where the disk is full, but not without a word.
PRINTF_LIKE(2, 3) static inline void log_json(Log *log, const char *format, ...) {
    static bool warned;
    char line[512];
    va_list args;
    va_start(args, format);
    int length = vsnprintf(line, sizeof line, format, args);
    va_end(args);
    off_t end = lseek(log->jsonl, 0, SEEK_END);
    if (write(log->jsonl, line, (size_t)length) == length) return;
    if (!warned) warn("cannot write to log.jsonl: %s; training goes on", strerror(errno));
    warned = true;
    if (ftruncate(log->jsonl, end)) return;  // half a line stays: there is nobody left to tell
}

static inline const char *log_duration(double seconds, char *text) {
    long s = seconds > 0 ? (long)(seconds + 0.5) : 0;
    if (s < 60) snprintf(text, 32, "%lds", s);
    else if (s < 3600) snprintf(text, 32, "%ldm %02lds", s / 60, s % 60);
    else if (s < 86400) snprintf(text, 32, "%ldh %02ldm", s / 3600, s / 60 % 60);
    else snprintf(text, 32, "%ldd %02ldh", s / 86400, s / 3600 % 24);
    return text;
}

// Update number `step` (the first is 1) is done: its loss before the update, gradient norm before clipping, learning
// rate, duration and tokens. `skipped` says that the update was left out.
static inline void log_step(Log *log, long long step, double loss, double norm, double rate, double seconds, double tokens,
                            bool skipped) {
    char a[32], b[32], c[32], left[32];
    double pace = (seconds_now() - log->start) / (double)(step - log->first);
    log_json(log, "{\"step\": %lld, \"loss\": %s, \"norm\": %s, \"lr\": %s, \"ms\": %.3f, \"tokens_per_second\": %.1f%s}\n", step,
             json_number_text(loss, a), json_number_text(norm, b), json_number_text(rate, c), 1e3 * seconds,
             tokens / seconds, skipped ? ", \"skipped\": true" : "");
    bool report = step % log->every == 0 || step == log->steps || step == log->first + 1 || skipped;
    if (!report && !log->terminal) return;
    if (log->in_place) fputs("\r\033[K", stdout);  // back to the start of the line, and clear it
    if (!report) fputs("\033[?7l", stdout);         // what is too long for the terminal is cut off, not wrapped
    printf("step %*lld/%lld | loss %.4f | norm %6.3f | lr %.2e | %7.1f ms | %7.0f tok/s | %s left%s",
           snprintf(NULL, 0, "%lld", log->steps), step, log->steps, loss, norm, rate, 1e3 * seconds, tokens / seconds,
           log_duration(pace * (double)(log->steps - step), left), skipped ? " | not finite: update skipped" : "");
    log->in_place = !report;
    fputs(report ? "\n" : "\033[?7h", stdout);
    fflush(stdout);
}

static inline void log_validation(Log *log, long long step, double loss) {
    char a[32];
    log_break(log);
    log_json(log, "{\"step\": %lld, \"val_loss\": %s}\n", step, json_number_text(loss, a));
    printf("step %*lld/%lld | validation loss %.4f\n", snprintf(NULL, 0, "%lld", log->steps), step, log->steps, loss);
    fflush(stdout);
}

#endif
