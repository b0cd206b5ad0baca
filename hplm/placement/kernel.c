/* The screen's loops over the texts of a trace. kernel.py calls them; stepping.py computes the same in Python, and says what. */

#include <stdint.h>

#define API __attribute__((visibility("default")))
#define NEVER 1e300
#define TERMS 4

/* A trace, and a placement for it. Times are nanoseconds. */
typedef struct {
    int64_t texts, groups, lines, backbones, stages;  /* `stages`: the most of any group */
    int64_t most;                                     /* texts of a batch */
    const int64_t *arrival, *timeout;                 /* by text */
    const int32_t *unit, *tokens;                     /* by text */
    const int32_t *line;                              /* by unit; -1: no group serves it */
    const int32_t *backbone;                          /* by line */
    const uint8_t *serves;                            /* [line][group] */
    const int32_t *depth;                             /* stages of each group */
    const double *terms;                              /* [group][backbone][stage][TERMS] */
    const double *around;                             /* [backbone][TERMS] */
    double *clock;                                    /* [group][stage]: when each stage is free; zeros at first */
    double *end, *busy;                               /* by text; by group */
    double *wakes;                                    /* by group: when its first stage is free; NEVER, as at first: it is idle */
    int32_t *head, *tail, *next;                      /* by line: its first and last text, -1 at first; by text: the one behind it */
} Case;


static double took(const double *terms, double tokens, double scores, double texts) {
    return terms[0] + terms[1] * tokens + terms[2] * scores + terms[3] * texts;
}

static const double *terms_of(const Case *c, int64_t group, int64_t backbone) {
    return c->terms + (group * c->backbones + backbone) * c->stages * TERMS;
}

/* Returns when a batch that is ready now is answered: after all stages of a group, and the way around them. */
static double answered(const Case *c, int64_t group, int64_t backbone, double now, double tokens, double scores, double texts) {
    const double *terms = terms_of(c, group, backbone), *clock = c->clock + group * c->stages;
    for (int64_t stage = 0; stage < c->depth[group]; stage++, terms += TERMS)
        now = (now > clock[stage] ? now : clock[stage]) + took(terms, tokens, scores, texts);
    return now + took(c->around + backbone * TERMS, tokens, scores, texts);
}

/* Lets a batch pass: the stages are taken until then. */
static void take(const Case *c, int64_t group, int64_t backbone, double now, double tokens, double scores, double texts) {
    const double *terms = terms_of(c, group, backbone);
    double *clock = c->clock + group * c->stages, all = 0;
    for (int64_t stage = 0; stage < c->depth[group]; stage++, terms += TERMS) {
        double own = took(terms, tokens, scores, texts);
        now = (now > clock[stage] ? now : clock[stage]) + own;
        clock[stage] = now;
        all += own;
    }
    c->busy[group] += all / c->depth[group];
}

/* Returns the line of a group whose first text is the oldest, or -1. `backbone`: only its lines; -1: all. */
static int64_t oldest(const Case *c, int64_t group, int64_t backbone) {
    int64_t best = -1;
    for (int64_t line = 0; line < c->lines; line++) {
        if (c->head[line] < 0 || !c->serves[line * c->groups + group]) continue;
        if (backbone >= 0 && c->backbone[line] != backbone) continue;
        if (best < 0 || c->head[line] < c->head[best]) best = line;
    }
    return best;
}

/* Starts the next batch of a group whose first stage is free. Returns when that is free again, or NEVER if nothing waits. */
static double start(const Case *c, int64_t group, double now) {
    double tokens = 0, scores = 0, until = NEVER, end = 0;
    int64_t backbone = -1, texts = 0, line;
    int32_t first = -1, last = -1;
    while (texts < c->most && (line = oldest(c, group, backbone)) >= 0) {
        int32_t i = c->head[line];
        double own = c->tokens[i], all_tokens = tokens + own, all_scores = scores + own * own;
        double with = answered(c, group, c->backbone[line], now, all_tokens, all_scores, (double)(texts + 1));
        double latest = (double)(c->arrival[i] + c->timeout[i]);
        latest = latest < until ? latest : until;
        if (texts && with > latest) break;
        c->head[line] = c->next[i];
        if (with > latest) continue; /* it is refused */
        tokens = all_tokens, scores = all_scores, until = latest, end = with, backbone = c->backbone[line];
        if (last >= 0) c->next[last] = i;
        else first = i;
        last = i;
        texts++;
    }
    if (!texts) return NEVER;
    take(c, group, backbone, now, tokens, scores, (double)texts);
    c->next[last] = -1;
    for (int32_t i = first; i >= 0; i = c->next[i]) c->end[i] = end;
    return c->clock[group * c->stages];
}

/* Lets groups whose first stage is free by now start their next batches. */
static void wake(const Case *c, double now) {
    while (c->groups) {
        int64_t next = 0;
        for (int64_t group = 1; group < c->groups; group++)
            if (c->wakes[group] < c->wakes[next]) next = group;
        if (c->wakes[next] > now) return;
        c->wakes[next] = start(c, next, c->wakes[next]);
    }
}

/* Does what hplm_screen does with batches of one text. Then a text's group and time are known when it arrives. */
static void one_by_one(const Case *c) {
    for (int64_t i = 0; i < c->texts; i++) {
        int64_t line = c->line[c->unit[i]], best = -1;
        double now = (double)c->arrival[i], tokens = c->tokens[i], soonest = NEVER;
        if (line < 0) continue;
        for (int64_t group = 0; group < c->groups; group++) {
            if (!c->serves[line * c->groups + group]) continue;
            double is_free = c->clock[group * c->stages];
            is_free = is_free > now ? is_free : now;
            if (is_free < soonest) soonest = is_free, best = group;
        }
        double end = answered(c, best, c->backbone[line], now, tokens, tokens * tokens, 1);
        if (end > (double)(c->arrival[i] + c->timeout[i])) continue; /* it is refused */
        take(c, best, c->backbone[line], now, tokens, tokens * tokens, 1);
        c->end[i] = end;
    }
}

API void hplm_screen(const Case *c) {
    if (c->most == 1) {
        one_by_one(c);
        return;
    }
    for (int64_t i = 0; i < c->texts; i++) {
        double now = (double)c->arrival[i];
        wake(c, now);
        int64_t line = c->line[c->unit[i]];
        if (line < 0) continue;
        c->next[i] = -1;
        if (c->head[line] >= 0) c->next[c->tail[line]] = (int32_t)i;
        else c->head[line] = (int32_t)i;
        c->tail[line] = (int32_t)i;
        for (int64_t group = 0; group < c->groups; group++) {
            if (!c->serves[line * c->groups + group] || c->wakes[group] < NEVER) continue;
            c->wakes[group] = start(c, group, now);
            break;
        }
    }
    wake(c, NEVER / 2);
}
