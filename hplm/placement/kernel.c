/* The screen's two loops over the texts of a trace. kernel.py calls them; screen.py computes the same in Python, and says what. */

#include <stdint.h>

#define API __attribute__((visibility("default")))
#define VERSION 1 /* of these functions, as kernel.py has it */
#define REFUSED -1.0
#define NEVER 1e300
#define TERMS 4

/* A trace, and a placement for it. Times are nanoseconds. */
typedef struct {
    int64_t texts, groups, backbones, stages;  /* `stages`: the most of any group */
    const int64_t *arrival, *timeout;          /* by text; timeout 0: no deadline */
    const int32_t *unit, *tokens;              /* by text */
    const int32_t *backbone;                   /* by unit */
    const int32_t *first_group, *group;        /* the groups of unit u: group[first_group[u]] to group[first_group[u + 1] - 1] */
    const int32_t *first_unit, *units_of;      /* the units of each group, in the same way */
    const int32_t *depth;                      /* stages of each group */
    const double *terms;                       /* [group][backbone][stage][TERMS] */
    const double *around;                      /* [backbone][TERMS] */
    double *clock;                             /* [group][stage]: when each stage is free; zeros at first */
    double *end, *busy;                        /* by text; by group */
} Case;

/* The texts of each unit that wait, oldest first: a list through `next`. -1: none. */
typedef struct {
    int32_t *head, *tail, *next;
} Lines;

API int64_t hplm_version(void) { return VERSION; }

static double took(const double *terms, double tokens, double scores, double texts) {
    return terms[0] + terms[1] * tokens + terms[2] * scores + terms[3] * texts;
}

static const double *terms_of(const Case *c, int64_t group, int64_t backbone) {
    return c->terms + (group * c->backbones + backbone) * c->stages * TERMS;
}

/* Returns when a batch that is ready now has passed all stages of a group. */
static double passes(const Case *c, int64_t group, int64_t backbone, double now, double tokens, double scores, double texts) {
    const double *terms = terms_of(c, group, backbone), *clock = c->clock + group * c->stages;
    for (int64_t stage = 0; stage < c->depth[group]; stage++, terms += TERMS)
        now = (now > clock[stage] ? now : clock[stage]) + took(terms, tokens, scores, texts);
    return now;
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

API void hplm_screen(const Case *c) {
    for (int64_t i = 0; i < c->texts; i++) {
        int64_t unit = c->unit[i], backbone = c->backbone[unit], best = -1;
        double now = (double)c->arrival[i], tokens = c->tokens[i], shortest = NEVER;
        c->end[i] = REFUSED;
        for (int64_t at = c->first_group[unit]; at < c->first_group[unit + 1]; at++) {
            double queue = c->clock[c->group[at] * c->stages];
            queue = queue > now ? queue : now;
            if (queue < shortest) {
                shortest = queue;
                best = c->group[at];
            }
        }
        if (best < 0) continue;
        double around = took(c->around + backbone * TERMS, tokens, tokens * tokens, 1);
        double end = passes(c, best, backbone, now, tokens, tokens * tokens, 1) + around;
        if (c->timeout[i] && end - now > (double)c->timeout[i]) continue;
        take(c, best, backbone, now, tokens, tokens * tokens, 1);
        c->end[i] = end;
    }
}

static int in_time(const Case *c, int64_t i, double end) {
    return !c->timeout[i] || end - (double)c->arrival[i] <= (double)c->timeout[i];
}

/* Returns the unit of a group whose first text is the oldest, or -1. `backbone`: only its units; -1: all. */
static int64_t oldest(const Case *c, const Lines *lines, int64_t group, int64_t backbone) {
    int64_t best = -1;
    for (int64_t at = c->first_unit[group]; at < c->first_unit[group + 1]; at++) {
        int64_t unit = c->units_of[at];
        if (lines->head[unit] < 0 || (backbone >= 0 && c->backbone[unit] != backbone)) continue;
        if (best < 0 || lines->head[unit] < lines->head[best]) best = unit;
    }
    return best;
}

/* Starts the next batch of a group whose first stage is free. Returns when that is free again, or NEVER if nothing waits. */
static double start(const Case *c, const Lines *lines, int64_t group, double now, int64_t most) {
    double tokens = 0, scores = 0, until = NEVER;
    int64_t backbone = -1, texts = 0, unit;
    int32_t first = -1, last = -1;
    while (texts < most && (unit = oldest(c, lines, group, backbone)) >= 0) {
        int32_t i = lines->head[unit];
        double own = c->tokens[i], all_tokens = tokens + own, all_scores = scores + own * own;
        const double *around = c->around + c->backbone[unit] * TERMS;
        double end = passes(c, group, c->backbone[unit], now, all_tokens, all_scores, (double)(texts + 1)) +
                     took(around, all_tokens, all_scores, (double)(texts + 1));
        double latest = c->timeout[i] ? (double)(c->arrival[i] + c->timeout[i]) : NEVER;
        latest = latest < until ? latest : until;
        if (texts && end > latest) break;
        lines->head[unit] = lines->next[i];
        if (!texts && !in_time(c, i, end)) continue; /* it is refused */
        tokens = all_tokens, scores = all_scores, until = latest, backbone = c->backbone[unit];
        if (last >= 0) lines->next[last] = i;
        else first = i;
        last = i;
        texts++;
    }
    if (!texts) return NEVER;
    double end = passes(c, group, backbone, now, tokens, scores, (double)texts) +
                 took(c->around + backbone * TERMS, tokens, scores, (double)texts);
    take(c, group, backbone, now, tokens, scores, (double)texts);
    lines->next[last] = -1;
    for (int32_t i = first; i >= 0; i = lines->next[i]) c->end[i] = end;
    return c->clock[group * c->stages];
}

/* `wakes`: by group, NEVER at first; `most`: texts of a batch. */
API void hplm_screen_batches(const Case *c, const Lines *lines, double *wakes, int64_t most) {
    for (int64_t i = 0; i <= c->texts; i++) {
        double now = i < c->texts ? (double)c->arrival[i] : NEVER / 2;
        while (c->groups) {
            int64_t next = 0;
            for (int64_t group = 1; group < c->groups; group++)
                if (wakes[group] < wakes[next]) next = group;
            if (wakes[next] > now) break;
            wakes[next] = start(c, lines, next, wakes[next], most);
        }
        if (i == c->texts) break;
        int64_t unit = c->unit[i];
        c->end[i] = REFUSED;
        lines->next[i] = -1;
        if (lines->head[unit] >= 0) lines->next[lines->tail[unit]] = (int32_t)i;
        else lines->head[unit] = (int32_t)i;
        lines->tail[unit] = (int32_t)i;
        for (int64_t at = c->first_group[unit]; at < c->first_group[unit + 1]; at++) {
            int64_t group = c->group[at];
            if (wakes[group] < NEVER) continue;
            wakes[group] = start(c, lines, group, now, most);
            break;
        }
        if (c->first_group[unit] == c->first_group[unit + 1]) lines->head[unit] = -1; /* no group has it */
    }
}
