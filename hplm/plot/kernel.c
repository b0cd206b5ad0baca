/* Lookup and gathering of texts without arrays in between. index.py and gathering.py call it, and
 * say what it computes.
 *
 * Compiled for any machine of its architecture. Faster instructions are in functions of their own, and used where the
 * processor has them.
 */

#ifndef WIDTH
#include "../model/kernel.h"

#define MOST_WORDS 5   /* of a key: a token has at most 64 bits and a window at most five tokens */
#define AHEAD 2        /* rows that are read ahead of the sums */
#define BLOCK 64       /* tokens whose searches wait for memory together */
#define ODD 0x9E3779B97F4A7C15ull

enum { FP16, BF16, INT8 };            /* codings (rows.py) */
enum { FP32_SUMS, BF16_SUMS };

/* A link of a chain: one table's index (index.py). */
typedef struct {
    const uint32_t *starts;
    const uint64_t *keys;
    const uint32_t *rows;
    int64_t bits;
    int64_t base;
} Link;

/* How tokens become keys (keys.py). */
typedef struct {
    int64_t n, centre, words, levels;
    int64_t word[MOST_WORDS], shift[MOST_WORDS];
    uint64_t masks[MOST_WORDS * (MOST_WORDS + 1)];  /* levels x words */
} Space;

static uint64_t bucket_of(const uint64_t *key, int64_t words, int64_t bits) {
    uint64_t mixed = key[0] * ODD;
    for (int64_t word = 1; word < words; word++) {
        mixed ^= mixed >> 32;
        mixed += key[word];
        mixed *= ODD;
    }
    mixed ^= mixed >> 32;
    return mixed * ODD >> (64 - bits);
}

static void key_of(const Space *space, const int64_t *tokens, int64_t length, int64_t at, uint64_t *key) {
    for (int64_t word = 0; word < space->words; word++) key[word] = 0;
    for (int64_t position = 0; position < space->n; position++) {
        int64_t from = at + position - space->centre;
        if (from >= 0 && from < length) key[space->word[position]] |= (uint64_t)(tokens[from] + 1) << space->shift[position];
    }
}

/* Finds the first hit of each of at most BLOCK keys. Every step is done for all of them, so that they wait for memory together. */
static void find_block(
    const Space *space, const Link *links, int64_t count, const uint64_t (*whole)[MOST_WORDS], int64_t tokens,
    int64_t *addresses, int64_t *tries
) {
    uint64_t keys[BLOCK][MOST_WORDS], buckets[BLOCK];
    uint32_t begin[BLOCK], end[BLOCK], left[BLOCK];
    int64_t words = space->words, open = tokens;
    for (int64_t i = 0; i < tokens; i++) {
        left[i] = (uint32_t)i;
        addresses[i] = 0;
        tries[i] = 0;
    }
    for (int64_t level = 0; level < space->levels && open; level++) {
        const uint64_t *mask = space->masks + level * words;
        for (int64_t i = 0; i < open; i++)
            for (int64_t word = 0; word < words; word++) keys[left[i]][word] = whole[left[i]][word] & mask[word];
        for (int64_t number = 0; number < count && open; number++) {
            const Link *link = links + number;
            for (int64_t i = 0; i < open; i++) {
                uint64_t bucket = bucket_of(keys[left[i]], words, link->bits);
                buckets[i] = bucket;
                __builtin_prefetch(link->starts + bucket);
            }
            for (int64_t i = 0; i < open; i++) {
                begin[i] = link->starts[buckets[i]];
                end[i] = link->starts[buckets[i] + 1];
                __builtin_prefetch(link->keys + (int64_t)begin[i] * words);
                __builtin_prefetch(link->rows + begin[i]);
            }
            int64_t still = 0;
            for (int64_t i = 0; i < open; i++) {
                const uint64_t *key = keys[left[i]];
                uint32_t place = begin[i];
                while (place < end[i] && memcmp(link->keys + (int64_t)place * words, key, 8 * (size_t)words)) place++;
                if (place < end[i]) {
                    addresses[left[i]] = link->rows[place] + link->base;
                    tries[left[i]] = level * count + number;
                } else {
                    left[still++] = left[i];
                }
            }
            open = still;
        }
    }
}

static int are_of(int64_t total, const int64_t *lengths, int64_t texts) {
    for (int64_t text = 0; text < texts; text++) {
        if (lengths[text] < 0 || lengths[text] > total) return 0;
        total -= lengths[text];
    }
    return total == 0;
}

/* Writes the address of each of `total` tokens, 0 if no table has it, and then the number of places tried before.
 *
 * Returns 0, or -1 if so many tokens are not those of the texts.
 */
API int64_t hplm_lookup(
    const Space *space, const Link *links, int64_t count, const int64_t *tokens, int64_t total, const int64_t *lengths,
    int64_t texts, int64_t *addresses
) {
    uint64_t whole[BLOCK][MOST_WORDS];
    int64_t *tries = addresses + total;
    if (!are_of(total, lengths, texts)) return -1;
    for (int64_t text = 0; text < texts; tokens += lengths[text], text++) {
        for (int64_t start = 0; start < lengths[text]; start += BLOCK) {
            int64_t size = lengths[text] - start < BLOCK ? lengths[text] - start : BLOCK;
            for (int64_t i = 0; i < size; i++) key_of(space, tokens, lengths[text], start + i, whole[i]);
            find_block(space, links, count, (const uint64_t(*)[MOST_WORDS])whole, size, addresses, tries);
            addresses += size;
            tries += size;
        }
    }
    return 0;
}

/* The stored vectors of a table, which has the addresses from base to base + size. */
typedef struct {
    const uint8_t *values;
    int64_t base, size;
} Rows;

/* Sums stored vectors, in the order given. */
typedef void Sum(void *restrict out, const uint8_t *const *vectors, int64_t count, int64_t hidden);

#define HALVES_8(p) _mm_loadu_si128((const __m128i *)(p))
#define HALVES_16(p) _mm256_loadu_si256((const __m256i *)(p))
#define FP16_8(p) _mm256_cvtph_ps(HALVES_8(p))
#define FP16_16(p) _mm512_cvtph_ps(HALVES_16(p))
#define BF16_8(p) _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(HALVES_8(p)), 16))
#define BF16_16(p) _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(HALVES_16(p)), 16))
#define BYTES_8(p) _mm256_cvtepi32_ps(_mm256_cvtepu8_epi32(_mm_loadl_epi64((const __m128i *)(p))))
#define BYTES_16(p) _mm512_cvtepi32_ps(_mm512_cvtepu8_epi32(_mm_loadu_si128((const __m128i *)(p))))

/* Writes to the nearest bf16, ties to even, as torch rounds. */
TARGET_8 INLINE void round_8(uint16_t *out, __m256 sum) {
    __m256i bits = _mm256_castps_si256(sum), odd = _mm256_and_si256(_mm256_srli_epi32(bits, 16), _mm256_set1_epi32(1));
    bits = _mm256_srli_epi32(_mm256_add_epi32(bits, _mm256_add_epi32(odd, _mm256_set1_epi32(0x7FFF))), 16);
    __m256i nan = _mm256_castps_si256(_mm256_cmp_ps(sum, sum, _CMP_UNORD_Q));
    bits = _mm256_blendv_epi8(bits, _mm256_set1_epi32(0x7FC0), nan);
    __m128i halves = _mm_packus_epi32(_mm256_castsi256_si128(bits), _mm256_extracti128_si256(bits, 1));
    _mm_storeu_si128((__m128i *)out, halves);
}

TARGET_16 INLINE void round_16(uint16_t *out, __m512 sum) {
    __m512i bits = _mm512_castps_si512(sum), odd = _mm512_and_si512(_mm512_srli_epi32(bits, 16), _mm512_set1_epi32(1));
    bits = _mm512_srli_epi32(_mm512_add_epi32(bits, _mm512_add_epi32(odd, _mm512_set1_epi32(0x7FFF))), 16);
    bits = _mm512_mask_mov_epi32(bits, _mm512_cmp_ps_mask(sum, sum, _CMP_UNORD_Q), _mm512_set1_epi32(0x7FC0));
    _mm256_storeu_si256((__m256i *)out, _mm512_cvtepi32_epi16(bits));
}

#define WIDTH 8
#include "kernel.c"
#undef WIDTH
#define WIDTH 16
#include "kernel.c"
#undef WIDTH

/* Returns where an address's row is, or NULL if no table has it. `guess` is the table of the last one. */
static inline const uint8_t *row_at(const Rows *tables, int64_t count, int64_t *guess, int64_t address, int64_t stride) {
    for (int64_t i = *guess, tried = 0; tried < count; tried++, i = i + 1 < count ? i + 1 : 0) {
        if (address >= tables[i].base && address - tables[i].base < tables[i].size) {
            *guess = i;
            return tables[i].values + (address - tables[i].base) * stride;
        }
    }
    return NULL;
}

/* Sums for each token its vectors in its own window and in those of its neighbours: tokens x hidden.
 *
 * A token's vectors are added in order of position, in fp32, whatever else is in the batch. Beyond the ends of a text the null
 * row is taken. Returns 0, or -1 if no table has an address, or so many are not those of the texts. `hidden` is a multiple of 16.
 */
API int64_t hplm_gather(
    const Rows *tables, int64_t count, const int64_t *addresses, int64_t total, const int64_t *lengths, int64_t texts,
    int64_t centre, int64_t vectors, int64_t hidden, int64_t coding, void *out, int64_t type, int64_t instructions
) {
    if (!are_of(total, lengths, texts)) return -1;
    Sum *sum = (instructions == 2 ? SUMS_16 : SUMS_8)[type][coding];
    int64_t width = coding == INT8 ? hidden + 8 : 2 * hidden, stride = vectors * width, reach = vectors == 1 ? 0 : centre;
    int64_t guess = 0, guess_ahead = 0;
    const uint8_t *stored[MOST_WORDS];
    char *into = out;
    for (int64_t text = 0; text < texts; addresses += lengths[text], text++) {
        int64_t length = lengths[text];
        for (int64_t token = 0; token < length; token++) {
            int64_t next = token + reach + AHEAD;
            const uint8_t *coming = next < length ? row_at(tables, count, &guess_ahead, addresses[next], stride) : NULL;
            for (int64_t line = 0; coming && line < stride; line += 64) __builtin_prefetch(coming + line);
            for (int64_t position = 0; position < vectors; position++) {
                int64_t from = token + reach - position;
                const uint8_t *row = tables->values;
                if (from >= 0 && from < length) row = row_at(tables, count, &guess, addresses[from], stride);
                if (!row) return -1;
                stored[position] = row + position * width;
            }
            sum(into, stored, vectors, hidden);
            into += hidden * (type == BF16_SUMS ? 2 : 4);
        }
    }
    return 0;
}

#else

/* Adds numbers of a vector to a sum, which is empty before the first vector. */
TARGET INLINE VECTOR AT(plus)(VECTOR sum, int64_t vector, const uint8_t *stored, int64_t at, int64_t hidden, const int coding) {
    if (coding == INT8) { /* behind the bytes are scale and offset; the offset is added first, as torch does */
        const float *tail = (const float *)(stored + hidden); /* x86 reads them at any place */
        VECTOR scale = OP(set1)(tail[0]), offset = OP(set1)(tail[1]);
        return OP(fmadd)(AT(BYTES)(stored + at), scale, vector ? OP(add)(sum, offset) : offset);
    }
    VECTOR numbers = coding == FP16 ? AT(FP16)(stored + 2 * at) : AT(BF16)(stored + 2 * at);
    return vector ? OP(add)(sum, numbers) : numbers;
}

TARGET INLINE void AT(sum)(
    void *restrict out, const uint8_t *const *vectors, int64_t count, int64_t hidden, const int coding, const int type
) {
    for (int64_t at = 0; at < hidden; at += WIDTH) {
        VECTOR sum = AT(plus)(OP(setzero)(), 0, vectors[0], at, hidden, coding);
        for (int64_t i = 1; i < count; i++) sum = AT(plus)(sum, i, vectors[i], at, hidden, coding);
        if (type == FP32_SUMS) OP(storeu)((float *)out + at, sum);
        else AT(round)((uint16_t *)out + at, sum);
    }
}

#define SUM(CODING, TYPE)                                                                                                       \
    TARGET static void AT(CODING##_to_##TYPE)(void *restrict out, const uint8_t *const *vectors, int64_t count, int64_t hidden) {\
        if (count == 3) AT(sum)(out, vectors, 3, hidden, CODING, TYPE); /* the usual window, unrolled */                        \
        else AT(sum)(out, vectors, count, hidden, CODING, TYPE);                                                                \
    }
SUM(FP16, FP32_SUMS) SUM(BF16, FP32_SUMS) SUM(INT8, FP32_SUMS) SUM(FP16, BF16_SUMS) SUM(BF16, BF16_SUMS) SUM(INT8, BF16_SUMS)
#undef SUM

static Sum *const AT(SUMS)[2][3] = { /* by type of the sums, and coding */
    {AT(FP16_to_FP32_SUMS), AT(BF16_to_FP32_SUMS), AT(INT8_to_FP32_SUMS)},
    {AT(FP16_to_BF16_SUMS), AT(BF16_to_BF16_SUMS), AT(INT8_to_BF16_SUMS)},
};
#endif
