// The learning rate as a function of the step: a linear warm-up, then one of four shapes.
#ifndef GPT_SCHEDULE_H
#define GPT_SCHEDULE_H

#include <math.h>
#include <string.h>

typedef struct {
    const char *shape;  // "cosine", "linear", "constant" or "wsd" (warm-up, stable, decay)
    double peak;        // the learning rate after the warm-up
    double final;       // where it ends, as a fraction of the peak
    long long warmup;   // steps of warm-up
    long long steps;    // steps of the whole run
} Schedule;

// The rate for update `step`, counted from 0. The first warm-up step already learns (peak / warmup), step `warmup`
// is the first at the peak, and step `steps` (one past the last) would be at final * peak.
static inline double schedule_rate(const Schedule *s, long long step) {
    if (step < s->warmup) return s->peak * (double)(step + 1) / (double)s->warmup;
    if (step > s->steps) step = s->steps;
    double floor = s->peak * s->final, span = (double)(s->steps - s->warmup);
    double done = span > 0 ? (double)(step - s->warmup) / span : 1;  // 0 at the end of the warm-up, 1 at the end
    if (!strcmp(s->shape, "cosine")) return floor + 0.5 * (1 + cos(M_PI * done)) * (s->peak - floor);
    if (!strcmp(s->shape, "linear")) return s->peak + (floor - s->peak) * done;
    if (!strcmp(s->shape, "wsd")) {
        // Stable up to four fifths of the run, then down as 1 - sqrt(x), which Hägele et al., "Scaling laws and
        // compute-optimal training beyond fixed training durations" (2024), found to end lower than a straight line.
        double decay = fmin(0.2 * (double)s->steps, span), into = (double)step - ((double)s->steps - decay);
        return into <= 0 ? s->peak : floor + (1 - sqrt(into / decay)) * (s->peak - floor);
    }
    return s->peak;
}

#endif
