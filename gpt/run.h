// What trainers do alike around their steps: options, data, the model's shape and where to start from, what it will take; reading
// batches, writing text, ending.
#ifndef GPT_RUN_H
#define GPT_RUN_H

#include <signal.h>

#include "checkpoint.h"
#include "data.h"
#include "log.h"
#include "sample.h"
#include "schedule.h"

typedef struct {
    const char *program;         // as it was called, for messages
    Options options;
    GptConfig config;
    bool trains;                 // has data and steps to do
    bool prompts;                // has a prompt to write on from
    bool locked;                 // the output folder is ours
    char start_from[PATH_SIZE];  // a checkpoint's folder, or "" for fresh weights
    bool resumes;                // go on where start_from stopped, rather than only take its weights
    Progress progress;
    Data train, val;
    int accumulation;            // batches in an update
    Schedule schedule;
} Run;

// ---------------------------------------------------------------------------
// Ctrl-C, SIGTERM, and SIGHUP from a terminal that closes: the first finishes the step and saves, the second stops at once

static volatile sig_atomic_t stop_requested;

static void stop_on_signal(int signal_number) {
    static const char message[] = "\nstopping; once more to stop at once\n";
    int error = errno;  // of whatever was interrupted
    stop_requested = signal_number;
    ssize_t told = write(STDERR_FILENO, message, sizeof message - 1);
    (void)told;
    signal(SIGINT, SIG_DFL);  // the next one, of any kind, ends the program at once
    signal(SIGTERM, SIG_DFL);
    signal(SIGHUP, SIG_DFL);
    errno = error;
}

static inline void catch_signals(void) {
    struct sigaction action, before;
    memset(&action, 0, sizeof action);
    action.sa_handler = stop_on_signal;
    action.sa_flags = SA_RESTART;
    sigaction(SIGINT, &action, NULL);
    sigaction(SIGTERM, &action, NULL);
    if (!sigaction(SIGHUP, NULL, &before) && before.sa_handler != SIG_IGN) sigaction(SIGHUP, &action, NULL);  // nohup ignores it
}

// ---------------------------------------------------------------------------

// Makes the output folder and locks it, once.
static inline bool run_lock_output(Run *run) {
    if (!run->locked) run->locked = folder_claim(run->options.out);
    return run->locked;
}

// Finds the checkpoint for --resume and takes its progress and options over. With "auto" a damaged one is set aside
// and the one before it is used. False after fail().
static inline bool run_find_resume(Run *run) {
    Options *o = &run->options;
    bool damaged;
    if (!strcmp(o->resume, "no") || !strcmp(o->resume, "0")) return true;
    if (strcmp(o->resume, "auto") && strcmp(o->resume, "1")) {
        snprintf(run->start_from, PATH_SIZE, "%s", o->resume);
        if (!checkpoint_newest(o->resume, INT64_MAX, run->start_from) && access(run->start_from, F_OK))
            return fail("there is no checkpoint %s; --resume takes auto or a checkpoint's folder", o->resume);
        run->resumes = true;
        return checkpoint_read_manifest(run->start_from, &run->progress, o, &damaged);
    }
    char aside[PATH_SIZE + 32] = "";
    while (checkpoint_newest(o->out, INT64_MAX, run->start_from)) {
        run->resumes = checkpoint_read_manifest(run->start_from, &run->progress, o, &damaged);
        if (run->resumes) return true;
        if (!damaged || o->dry_run || !run_lock_output(run)) return false;
        if (rename(run->start_from, name_aside(run->start_from, "damaged", aside)))
            return fail("%s, and it cannot be renamed: %s", error_text, strerror(errno));
        warn("%s; it is set aside as %s", error_text, aside);
    }
    if (*aside) return fail("no whole checkpoint is left in %s; to start anew, choose another --out", o->out);
    if (!*o->data) return fail("there is no checkpoint in %s to resume from; --out names the folder of the run", o->out);
    *run->start_from = 0;
    memset(&run->progress, 0, sizeof run->progress);
    return true;
}

// The model's shape: from the checkpoint that is started from, or from the preset and the single sizes. V stays 0 if
// only the data can tell.
static inline bool run_find_shape(Run *run) {
    Options *o = &run->options;
    GptConfig *c = &run->config;
    const GptPreset *preset = gpt_preset(o->model);
    bool from_model = !run->resumes && !preset;
    if (from_model) {
        snprintf(run->start_from, PATH_SIZE, "%s", o->model);
        char config[PATH_SIZE + 16];
        if (!checkpoint_newest(o->model, INT64_MAX, run->start_from) &&
            (snprintf(config, sizeof config, "%s/config.json", o->model), access(config, R_OK)))
            return fail("--model %s is neither a preset (%s) nor a folder with a checkpoint", o->model, gpt_preset_names());
        // One of ours has a manifest, and has to be whole.
        bool damaged;
        Json *manifest = NULL;
        snprintf(config, sizeof config, "%s/%s", run->start_from, checkpoint_files[CHECKPOINT_MANIFEST]);
        if (!access(config, F_OK) && !(manifest = checkpoint_verify(run->start_from, &damaged))) return false;
        json_free(manifest);
    } else if (run->resumes && !preset && o->given[OPTION_model])
        return fail("--resume goes on with the model of %s; --model %s would start from another: give one of the two",
                    run->start_from, o->model);
    const struct { int option; const char *name; int64_t wanted; int preset; int *size; } sizes[] = {
        {OPTION_layers, "layers", o->layers, preset ? preset->layers : 0, &c->layers},
        {OPTION_heads, "heads", o->heads, preset ? preset->heads : 0, &c->heads},
        {OPTION_channels, "channels", o->channels, preset ? preset->channels : 0, &c->channels},
        {OPTION_seq, "seq", o->seq, preset ? preset->seq : 0, &c->seq},
        {OPTION_vocab, "vocab", o->vocab, 0, &c->vocab}};
    if ((run->resumes || from_model) && !checkpoint_read_config(run->start_from, c)) return false;
    for (int i = 0; i < 5; i++) {
        if (!run->resumes && !from_model) {
            *sizes[i].size = sizes[i].wanted ? (int)sizes[i].wanted : sizes[i].preset;
            continue;
        }
        // A size that the command line gives, itself or by a preset's name, must be the one that the checkpoint has.
        int64_t wanted = o->given[sizes[i].option] ? sizes[i].wanted : o->given[OPTION_model] && i < 3 ? sizes[i].preset : 0;
        if (wanted && wanted != *sizes[i].size)
            return fail("--%s %lld does not fit the checkpoint %s, which has %d; leave the option out, or start anew without the "
                        "checkpoint", sizes[i].name, (long long)wanted, run->start_from, *sizes[i].size);
    }
    return gpt_config_check(*c);
}

static inline bool run_open_data(Run *run) {
    Options *o = &run->options;
    if (!data_open(&run->train, o->data)) return false;
    size_t tokens = run->train.end, held_out = (size_t)((double)tokens * o->val_fraction);
    int vocab = run->train.vocab;
    if (*o->val_data) {
        if (!data_open(&run->val, o->val_data)) return false;
        held_out = 0;
        if (run->val.vocab != vocab)
            return fail("--data has tokens of a vocabulary of %d and --val-data of %d; both need the same tokenizer",
                        vocab, run->val.vocab);
    } else if (held_out && !data_open(&run->val, o->data)) return false;
    if (!run->config.vocab) run->config.vocab = vocab;
    // Bytes mean something only to a byte model: text for another vocabulary would train nonsense.
    if (run->train.text && run->config.vocab != BYTE_VOCAB)
        return fail("%s is text, which is read as bytes with a vocabulary of %d, and the model has one of %d; %s", o->data, BYTE_VOCAB,
                    run->config.vocab, *run->start_from ? "give it a .bin shard of its own tokens" : "leave --vocab out");
    uint64_t seed = (uint64_t)o->seed;
    int T = run->config.seq;
    return data_cut(&run->train, 0, tokens - held_out, T, seed, "--data") &&
           (!run->val.count || data_cut(&run->val, *o->val_data ? 0 : tokens - held_out, run->val.end, T, seed,
                                        *o->val_data ? "--val-data" : "the held-out part of --data"));
}

// The end of the program: closes what run_setup opened. Returns the exit code, which is `status` but after a signal, and does not
// return if the output could not be written.
static inline int run_close(Run *run, int status) {
    data_close(&run->train);
    data_close(&run->val);
    if (fflush(stdout) || ferror(stdout)) die("cannot write to the standard output: %s", strerror(errno));
    return stop_requested ? 128 + stop_requested : status;
}

// Reads the command line and everything it names. False after fail(): one sentence says what is wrong. Exits for --help.
static inline bool run_setup(Run *run, int argc, char **argv) {
    int fd;
    while ((fd = open("/dev/null", O_RDWR)) >= 0 && fd <= STDERR_FILENO) {}  // a closed stdout must not become some other file
    close(fd);
    signal(SIGPIPE, SIG_IGN);  // nobody reads stdout any more: training goes on
    signal(SIGXFSZ, SIG_IGN);  // a limit of file sizes is as a full disk
    memset(run, 0, sizeof *run);
    run->program = argv[0];
    Options *o = &run->options;
    for (int i = 1; i < argc; i++)
        if (!strcmp(argv[i], "--help") || !strcmp(argv[i], "-h")) {
            options_help(stdout, argv[0]);
            exit(run_close(run, 0));
        }
    options_defaults(o);
    if (!options_parse(o, argc, argv)) return false;
    if (!*o->out) return fail("--out is empty; it names the folder for checkpoints and log.jsonl");
    run->prompts = o->given[OPTION_prompt];
    if (o->steps == 0 && !run->prompts && !o->dry_run)
        return fail("--steps 0 trains nothing; add --prompt TEXT to write with a model");
    if (!run_find_resume(run) || !run_find_shape(run)) return false;
    if (run->prompts && !*run->start_from && !*o->data)
        return fail("--prompt needs a trained model: give --model FOLDER with a checkpoint or a run, or --data to train one first");
    // A prompt for a trained model only writes, unless data is named along with it.
    run->trains = o->steps > 0 && *o->data && !(run->prompts && *run->start_from && !o->given[OPTION_data]);
    if (!run->trains && !run->prompts && !o->dry_run)
        return fail("nothing to do: give --data FILE to train on a text, or --prompt TEXT and --model FOLDER to write; "
                    "--help lists all options");
    if (*o->data && (run->trains || o->dry_run) && !run_open_data(run)) return false;
    if (!run->config.vocab) run->config.vocab = BYTE_VOCAB;
    if ((run->prompts || o->sample_every) && run->config.vocab != BYTE_VOCAB)
        return fail("--%s needs a model of bytes (257 tokens); this one has %d tokens, whose tokenizer is not part of this program",
                    run->prompts ? "prompt" : "sample-every", run->config.vocab);

    int64_t batch_tokens = o->batch * run->config.seq;
    if (!o->total_batch) o->total_batch = batch_tokens;
    if (o->total_batch % batch_tokens)
        return fail("a --total-batch of %lld is no multiple of --batch times --seq, %lld x %d = %lld; choose one that is",
                    (long long)o->total_batch, (long long)o->batch, run->config.seq, (long long)batch_tokens);
    if (batch_tokens > INT32_MAX)
        return fail("--batch %lld times --seq %d is %lld tokens at once; at most %d can be computed, and --total-batch accumulates more",
                    (long long)o->batch, run->config.seq, (long long)batch_tokens, INT32_MAX);
    if (o->total_batch / batch_tokens > INT32_MAX)
        return fail("--total-batch %lld is %lld batches of %lld tokens; at most %d can be accumulated", (long long)o->total_batch,
                    (long long)(o->total_batch / batch_tokens), (long long)batch_tokens, INT32_MAX);
    run->accumulation = (int)(o->total_batch / batch_tokens);
    if (!o->given[OPTION_warmup] && !run->resumes && o->warmup > o->steps / 10) o->warmup = o->steps / 10;
    // Close to GPT-3's choices from 125 million parameters on; a trained model would be thrown back by as much.
    if (o->lr == 0) o->lr = (*run->start_from && !run->resumes ? 0.0384 : 0.384) / run->config.channels;
    Schedule schedule = {o->lr_schedule, o->lr, o->lr_final, o->warmup, o->steps};
    run->schedule = schedule;
    o->layers = run->config.layers, o->heads = run->config.heads, o->channels = run->config.channels;
    o->seq = run->config.seq, o->vocab = run->config.vocab;
    return true;
}

// Takes the output folder: nobody else's, and not one with checkpoints that this run would mix with. Warns if a resumed run
// has other data than before.
static inline bool run_claim_output(Run *run) {
    char newest[PATH_SIZE];
    const Options *o = &run->options;
    uint64_t tokens = run->train.end - run->train.begin;
    if (!run_lock_output(run)) return false;
    if (run->resumes && run->progress.tokens != tokens)
        warn("the data has %llu tokens to train on, and had %llu when %s was saved, so other samples follow than would have then",
             (unsigned long long)tokens, (unsigned long long)run->progress.tokens, run->start_from);
    run->progress.tokens = tokens;
    if (!checkpoint_newest(o->out, INT64_MAX, newest)) return true;
    long long step = checkpoint_step(newest, "");
    char parent[PATH_SIZE + 8];
    snprintf(parent, sizeof parent, "%s/..", run->start_from);
    struct stat out, from;
    if (run->resumes && (stat(o->out, &out) || stat(parent, &from) || out.st_ino != from.st_ino || out.st_dev != from.st_dev))
        return fail("the folder %s holds another run than the one that %s is of; choose another --out", o->out, run->start_from);
    if (!run->resumes)
        return fail("the folder %s already holds a run, saved at step %lld; --resume auto goes on with it, another --out starts a new one",
                    o->out, step);
    if (step > run->progress.step)
        return fail("the folder %s holds a later checkpoint, of step %lld, than the step %lld resumed from; choose another --out or move the "
                    "later ones away", o->out, step, (long long)run->progress.step);
    return true;
}

// Writes a word for a shell.
static inline void print_quoted(const char *word) {
    bool plain = *word && strspn(word, "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789_./-+=:,@%") == strlen(word);
    if (!plain) putchar('\'');
    for (const char *c = word; *c; c++) *c == '\'' ? (void)fputs("'\\''", stdout) : (void)putchar(*c);
    if (!plain) putchar('\'');
}

// After a signal: how to go on.
static inline void run_print_stopped(const Run *run) {
    printf("stopped by a signal after step %lld", (long long)run->progress.step);
    if (run->progress.step > 0) {
        fputs("; to go on: ", stdout);
        print_quoted(run->program);
        fputs(" --out ", stdout);
        print_quoted(run->options.out);
        fputs(" --resume auto", stdout);
        if (run->prompts) fputs(" --prompt ", stdout), print_quoted(run->options.prompt);
    }
    putchar('\n');
}

// The configuration and what the run will take. How it computes and in what memory are the trainer's to say.
static inline void run_print(const Run *run, const char *memory, const char *arithmetic) {
    const Options *o = &run->options;
    size_t parameters;
    free(gpt_tensors(run->config, &parameters));
    double checkpoint = 12.0 * (double)parameters, saves = o->save_every ? (double)(o->steps / o->save_every) + 1 : 1;
    if (o->keep && saves > (double)o->keep + 1) saves = (double)o->keep + 1;  // the new one is written before the oldest goes
    options_print(stdout, o, 116);
    printf("parameters    %zu (%.2f million)\n", parameters, (double)parameters / 1e6);
    printf("computes      %s\n", arithmetic);
    printf("memory        %s\n", memory);
    if (run->train.count) {
        printf("disk          %.1f MiB: up to %.0f checkpoint%s of %.1f MiB\n", saves * checkpoint / 1048576, saves,
               saves == 1 ? "" : "s", checkpoint / 1048576);
        double tokens = (double)o->steps * (double)o->total_batch, train = (double)(run->train.end - run->train.begin);
        printf("data          %zu tokens to train on in %d file%s, %zu to validate\n", run->train.end - run->train.begin,
               run->train.count, run->train.count == 1 ? "" : "s", run->val.count ? run->val.end - run->val.begin : 0);
        printf("steps         %lld of %lld tokens (%d x %lld x %d): %.4g tokens, %.1f times the data\n", (long long)o->steps,
               (long long)o->total_batch, run->accumulation, (long long)o->batch, run->config.seq, tokens, tokens / train);
    }
    if (*run->start_from)
        printf(run->resumes ? "resumes from  %s, step %lld\n" : "starts from   the weights of %s, at step %lld\n", run->start_from,
               (long long)run->progress.step);
    fflush(stdout);
}

// Fills `state` with what the run starts from: weights and, where it goes on training, moments. False after fail().
static inline bool run_load(const Run *run, ModelState state) {
    if (!*run->start_from) gpt_init(run->config, state.weights, (uint64_t)run->options.seed);
    else if (!checkpoint_load_weights(run->start_from, run->config, state.weights)) return false;
    return !(run->resumes && run->trains) || checkpoint_load_optimizer(run->start_from, run->config, state.m, state.v);
}

// ---------------------------------------------------------------------------
// Batches, text, and the end of a run

// B windows of T + 1 tokens, split into inputs (B, T) and, one position further, targets (B, T); `window` has room for one.
typedef struct { int *window, *inputs, *targets; } Batch;

// Reads samples `first` .. of the training data, or windows `first` .. of `windows` that are spread over the validation data.
// False after fail().
static inline bool batch_read(Batch *batch, const Run *run, bool training, uint64_t first, size_t windows, int B) {
    size_t T = (size_t)run->config.seq;
    int V = run->config.vocab;
    for (size_t b = 0; b < (size_t)B; b++) {
        if (!(training ? data_sample(&run->train, first + b, V, batch->window)
                       : data_spread(&run->val, first + b, windows, V, batch->window))) return false;
        memcpy(batch->inputs + b * T, batch->window, T * sizeof(int));
        memcpy(batch->targets + b * T, batch->window + 1, T * sizeof(int));
    }
    return true;
}

// How many windows a validation reads that computes B at once.
static inline size_t run_validation_windows(const Run *run, int B) {
    size_t windows = (run->val.end - run->val.begin - 1) / (size_t)run->config.seq;
    size_t wanted = (size_t)(run->options.val_steps * B);
    return wanted > 0 && windows > wanted ? wanted : windows;
}

// Writes `prompt` and o->tokens tokens after it, as long as no end of text is drawn. next_logits(model, tokens, count) gives the
// logits (V) that follow the last T tokens, or all if they are fewer.
static inline void run_write(const Run *run, const char *prompt, int64_t step, FILE *out,
                             const float *(*next_logits)(void *model, const int *tokens, int count), void *model) {
    const Options *o = &run->options;
    size_t length = strlen(prompt), T = (size_t)run->config.seq, total = length + 1 + (size_t)o->tokens;
    int *tokens = (int *)allocate(total, sizeof *tokens, "the text to generate");
    tokens[0] = TOKEN_END_OF_TEXT;  // what precedes a text
    for (size_t i = 0; i < length; i++) tokens[1 + i] = (unsigned char)prompt[i];
    fputs(prompt, out);
    for (size_t n = length + 1; n < total && !stop_requested; n++) {
        size_t seen = n < T ? n : T;
        const float *logits = next_logits(model, tokens + n - seen, (int)seen);
        float uniform = random_to_uniform(random4((uint64_t)o->seed, RANDOM_SAMPLE, (uint32_t)step, n).word[0]);
        tokens[n] = sample_token(logits, run->config.vocab, o->temperature, (int)o->top_k, o->top_p, uniform);
        if (tokens[n] == TOKEN_END_OF_TEXT) break;
        token_write(out, tokens[n]);
        fflush(out);
    }
    fputc('\n', out);
    free(tokens);
}

enum { SKIPS_TO_STOP = 5 };  // updates in a row that were not finite: the weights do not change, so it will not get better

// The end of training, for whatever reason: says why, saves `state` if it is `unsaved`, says how to go on. Returns the exit code.
static inline int run_end(const Run *run, ModelState state, bool ok, bool stuck, bool unsaved) {
    const Options *o = &run->options;
    if (stuck) {
        ok = fail("%d updates in a row had a loss or gradient that is not finite and were skipped; the weights are as before them; "
                  "a smaller --lr or another --seed may help", SKIPS_TO_STOP);
    }
    if (!ok) fprintf(stderr, "error: %s\n", error_text);
    if (unsaved) {
        if (!checkpoint_save(o->out, run->config, o, run->progress, state)) die_of_failure();
        printf("saved %s/ckpt-%08lld\n", o->out, (long long)run->progress.step);
    }
    if (stop_requested) run_print_stopped(run);
    if (run->progress.skipped) printf("%lld updates were skipped because they were not finite\n", (long long)run->progress.skipped);
    return ok ? 0 : 1;
}

#endif
