/* The screen's loop over the texts of a trace, with batches of one text. kernel.py calls it; stepping.py says what it does. */

#include <stdint.h>

#define API __attribute__((visibility("default")))
#define NEVER 1e300
#define TERMS 4

/* A trace, and a placement for it. Times are nanoseconds. */
typedef struct {
    int64_t texts, groups, backbones, stages;  /* `stages`: the most of any group */
    const int64_t *arrival, *timeout;          /* by text */
    const int32_t *unit, *tokens;              /* by text */
    const int32_t *backbone;                   /* by unit */
    const uint8_t *serves;                     /* [unit][group] */
    const int32_t *depth;                      /* stages of each group */
    const double *terms;                       /* [group][backbone][stage][TERMS] */
    const double *around;                      /* [backbone][TERMS] */
    double *clock;                             /* [group][stage]: when each stage is free; zeros at first */
    double *end, *busy;                        /* by text; by group */
} Case;

static double took(const double *terms, double tokens) {
    return terms[0] + terms[1] * tokens + terms[2] * (tokens * tokens) + terms[3];
}

/* Returns the group that serves a unit and whose first stage is free first, or -1. */
static int64_t soonest(const Case *c, int64_t unit, double now) {
    int64_t best = -1;
    double least = NEVER;
    for (int64_t group = 0; group < c->groups; group++) {
        if (!c->serves[unit * c->groups + group]) continue;
        double is_free = c->clock[group * c->stages];
        is_free = is_free > now ? is_free : now;
        if (is_free < least) least = is_free, best = group;
    }
    return best;
}

/* Returns when a text that is ready now is answered: after all stages of a group, and the way around them. `taken`: it passes. */
static double passed(const Case *c, int64_t group, int64_t backbone, double now, double tokens, int taken) {
    const double *terms = c->terms + (group * c->backbones + backbone) * c->stages * TERMS;
    double *clock = c->clock + group * c->stages, all = 0;
    for (int64_t stage = 0; stage < c->depth[group]; stage++, terms += TERMS) {
        double own = took(terms, tokens);
        now = (now > clock[stage] ? now : clock[stage]) + own;
        all += own;
        if (taken) clock[stage] = now;
    }
    if (taken) c->busy[group] += all / c->depth[group];
    return now + took(c->around + backbone * TERMS, tokens);
}

API void hplm_screen(const Case *c) {
    for (int64_t i = 0; i < c->texts; i++) {
        int64_t unit = c->unit[i], group = soonest(c, unit, (double)c->arrival[i]);
        if (group < 0) continue;
        double end = passed(c, group, c->backbone[unit], (double)c->arrival[i], c->tokens[i], 0);
        if (end > (double)(c->arrival[i] + c->timeout[i])) continue; /* it is refused */
        c->end[i] = passed(c, group, c->backbone[unit], (double)c->arrival[i], c->tokens[i], 1);
    }
}
