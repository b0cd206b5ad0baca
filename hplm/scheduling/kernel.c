/* Choosing a batch, without arrays for every step. kernel.py calls it, and says what it computes. */

#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#define API __attribute__((visibility("default")))
#define VERSION 3 /* of these functions, as kernel.py has it */
#define LONGEST 0xFFFF
#define NEVER INT64_MAX

/* A waiting text (columns.py: ROW). */
typedef struct {
    int64_t arrival, deadline, request, number;
    int32_t tokens, priority, slot_key, tenant;
} Text;

/* The waiting texts, in order of arrival. */
typedef struct {
    const Text *texts;
    const int64_t *demand; /* of each tenant */
    int64_t count, slot_keys, tenants;
} Waiting;

/* What fits in a batch, and the options of the policy. */
typedef struct {
    int64_t tokens, texts, slots;
    int64_t start_ns, horizon, reserved; /* `reserved`: tokens for the texts that have waited longest */
    double per_batch, late;              /* 1 / the nanoseconds of a batch; see timely.py */
    const double *limits;                /* tokens of the plan's first batches, together: `horizon` numbers */
} Rules;

/* A batch that is being filled (filling.py: Room). */
typedef struct {
    const Waiting *waiting;
    int64_t tokens, texts, slots, shortest, taken; /* `shortest` of all waiting texts */
    int64_t *chosen;
    uint8_t *inside;   /* by text */
    uint8_t *has_slot; /* by slot key; NULL: there are slots for all */
} Room;

API int64_t hplm_version(void) { return VERSION; }

static int is_full(const Room *room) { return room->tokens <= 0 || room->texts <= 0; }

static int has_slots(const Room *room, int64_t text) {
    return !room->has_slot || room->slots > 0 || room->has_slot[room->waiting->texts[text].slot_key];
}

static void take(Room *room, int64_t text) {
    uint8_t *has_slot = room->has_slot ? room->has_slot + room->waiting->texts[text].slot_key : NULL;
    if (has_slot && !*has_slot) {
        *has_slot = 1;
        room->slots--;
    }
    room->tokens -= room->waiting->texts[text].tokens;
    room->texts--;
    room->inside[text] = 1;
    room->chosen[room->taken++] = text;
}

/* Writes for each text the last batch that answers it in time. Returns whether all that can be in time fit. */
static int find_due(const Waiting *waiting, const Rules *rules, uint8_t *due) {
    int64_t tokens_due[256] = {0}, until = 0;
    double horizon = (double)rules->horizon;
    for (int64_t i = 0; i < waiting->count; i++) {
        double batches = (double)(waiting->texts[i].deadline - rules->start_ns) * rules->per_batch;
        batches = batches > 0 ? batches : 0;
        due[i] = (uint8_t)(batches < horizon ? batches : horizon);
        tokens_due[due[i]] += waiting->texts[i].tokens;
    }
    for (int64_t batch = 1; batch < rules->horizon; batch++) {
        until += tokens_due[batch];
        if (until > rules->tokens * batch) return 0;
    }
    return 1;
}

/* Sorts by one byte of the keys, and keeps the order of equal ones. */
static void sort_by_byte(const int32_t *from, int32_t *to, int64_t count, const uint16_t *keys, int shift) {
    int64_t starts[257] = {0};
    for (int64_t i = 0; i < count; i++) starts[(keys[from[i]] >> shift & 0xFF) + 1]++;
    for (int i = 0; i < 256; i++) starts[i + 1] += starts[i];
    for (int64_t i = 0; i < count; i++) to[starts[keys[from[i]] >> shift & 0xFF]++] = from[i];
}

/* Writes all texts into `order`, the shortest first. A text that cannot be in time counts as longer. Texts without a deadline
 * are last, in order of arrival.
 */
static void sort_best_first(
    const Waiting *waiting, const Rules *rules, const uint8_t *due, uint16_t *keys, int32_t *order, int32_t *spare
) {
    int64_t count = waiting->count;
    double by_due[] = {rules->late, 1};
    uint16_t all = 0;
    for (int64_t i = 0; i < count; i++) {
        double weight = by_due[due[i] > 0] * waiting->texts[i].tokens;
        keys[i] = (uint16_t)(weight < LONGEST && waiting->texts[i].deadline != NEVER ? weight : LONGEST);
        all |= keys[i];
        spare[i] = (int32_t)i;
    }
    sort_by_byte(spare, order, count, keys, 0);
    if (all <= 0xFF) return;
    sort_by_byte(order, spare, count, keys, 8);
    memcpy(order, spare, (size_t)count * sizeof *order);
}

/* Puts the planned ones of the first `count` texts in front, the most urgent first (timely.py: _plan). */
static void plan_first(
    const Waiting *waiting, const Rules *rules, const uint8_t *due, int all, int32_t *order, int64_t count, int32_t *left,
    int32_t *spare, uint8_t *is_planned
) {
    int64_t planned = 0, others = 0;
    for (int64_t i = 0; i < count; i++) left[i] = order[i];
    if (all) {
        for (int64_t i = 0; i < count; i++)
            if (due[order[i]]) left[planned++] = order[i];
    } else {
        planned = count;
        for (int64_t batch = 1; batch <= rules->horizon; batch++) {
            int64_t sum = 0, kept = 0;
            for (int64_t i = 0; i < planned; i++) {
                int until = due[left[i]] <= batch;
                if (until) sum += waiting->texts[left[i]].tokens;
                if (!until || (double)sum <= rules->limits[batch - 1]) left[kept++] = left[i];
            }
            planned = kept;
        }
    }
    memset(is_planned, 0, (size_t)waiting->count);
    for (int64_t i = 0; i < planned; i++) is_planned[left[i]] = 1;
    for (int64_t i = 0; i < count; i++)
        if (!is_planned[order[i]]) spare[others++] = order[i];
    memcpy(order + planned, spare, (size_t)others * sizeof *order);
    int64_t starts[257] = {0};
    for (int64_t i = 0; i < planned; i++) starts[due[left[i]] + 1]++;
    for (int i = 0; i < 256; i++) starts[i + 1] += starts[i];
    for (int64_t i = 0; i < planned; i++) order[starts[due[left[i]]]++] = left[i];
}

/* Returns the most that one tenant may have of the room (sharing.py: fair_share). */
static double fair_share(const Waiting *waiting, int64_t room) {
    int64_t wanting = 0, left = room;
    double level = 0;
    for (int64_t i = 0; i < waiting->tenants; i++) wanting += waiting->demand[i] > 0;
    while (wanting) {
        double before = level;
        int64_t satisfied = 0, theirs = 0;
        level = (double)left / (double)wanting;
        for (int64_t i = 0; i < waiting->tenants; i++) {
            double demand = (double)waiting->demand[i];
            if (demand > before && demand <= level) {
                satisfied++;
                theirs += waiting->demand[i];
            }
        }
        if (!satisfied) return level;
        left -= theirs;
        wanting -= satisfied;
    }
    return -1; /* no limit */
}

/* Adds texts in this order: first those within their tenant's fair share, then the others (sharing.py: fair_first). */
static void fill_fairly(Room *room, const int32_t *order, int64_t *used) {
    const Waiting *waiting = room->waiting;
    double share = waiting->tenants > 1 ? fair_share(waiting, room->tokens) : -1;
    int may_be_larger = !room->taken; /* or a text that is longer than a batch would wait for ever */
    memset(used, 0, (size_t)waiting->tenants * sizeof *used);
    for (int within = 1; within >= (share < 0); within--) {
        for (int64_t i = 0; i < waiting->count && !is_full(room); i++) {
            if (room->tokens < room->shortest && !may_be_larger) return;
            int64_t text = order[i], tokens = waiting->texts[text].tokens;
            if (room->inside[text]) continue;
            if (within && share >= 0) {
                int64_t *mine = used + waiting->texts[text].tenant;
                int first = !*mine;
                *mine += tokens;
                if (!first && (double)*mine > share) continue;
            }
            if ((tokens <= room->tokens || may_be_larger) && has_slots(room, text)) take(room, text);
            may_be_larger = 0;
        }
    }
}

/* Writes the indexes of the texts of the next batch, and the tokens that it takes from the reserve. Returns the number of texts,
 * or -1 if a text has a priority or there is no memory. `chosen` has room for all texts.
 */
API int64_t hplm_choose(const Waiting *waiting, const Rules *rules, int64_t *chosen, int64_t *reserve) {
    int32_t priority = 0, shortest = INT32_MAX;
    for (int64_t i = 0; i < waiting->count; i++) {
        priority |= waiting->texts[i].priority;
        shortest = waiting->texts[i].tokens < shortest ? waiting->texts[i].tokens : shortest;
    }
    if (priority) return -1;
    size_t count = (size_t)waiting->count, slot_keys = (size_t)waiting->slot_keys;
    size_t numbers = (size_t)waiting->tenants * sizeof(int64_t);
    char *memory = malloc(numbers + count * (3 * sizeof(int32_t) + sizeof(uint16_t) + 2) + slot_keys);
    if (!memory) return -1;
    int64_t *used = (int64_t *)memory;
    int32_t *order = (int32_t *)(memory + numbers), *left = order + count, *spare = left + count;
    uint16_t *keys = (uint16_t *)(spare + count);
    uint8_t *due = (uint8_t *)(keys + count), *inside = due + count, *has_slot = inside + count;
    memset(inside, 0, count + slot_keys);

    int all = find_due(waiting, rules, due);
    sort_best_first(waiting, rules, due, keys, order, spare);
    int64_t head = waiting->count, sum = 0;
    if (!all) {
        head = 0;
        double most = rules->limits[rules->horizon - 1];
        while (head < waiting->count && (double)sum < most) sum += waiting->texts[order[head++]].tokens;
    }
    plan_first(waiting, rules, due, all, order, head, left, spare, (uint8_t *)keys); /* the weights are not needed any more */

    int has_all_slots = waiting->slot_keys <= rules->slots;
    Room room = {
        waiting, rules->tokens, rules->texts, rules->slots, shortest, 0, chosen, inside, has_all_slots ? NULL : has_slot
    };
    int64_t least = rules->tokens - rules->reserved;
    for (int64_t i = 0; i < waiting->count && !is_full(&room); i++) {
        if (!due[i]) continue;
        int64_t tokens = waiting->texts[i].tokens;
        if (tokens > room.tokens || room.tokens - tokens < least || !has_slots(&room, i)) break;
        take(&room, i);
    }
    *reserve = rules->tokens - room.tokens;
    fill_fairly(&room, order, used);
    free(memory);
    return room.taken;
}
