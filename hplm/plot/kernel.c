/* Lookup and gathering of texts without arrays in between. kernel.py calls it, and says what it computes.
 *
 * Compiled for any machine of its architecture. Faster instructions are in functions of their own, and used where the
 * processor has them.
 */

#define VERSION 1      /* of these functions, as kernel.py has it */
#include "../model/kernel.h"

#define MOST_WORDS 5   /* of a key: a token has at most 64 bits and a window at most five tokens */
#define AHEAD 2        /* rows that are read ahead of the sums */
#define BLOCK 64       /* tokens whose searches wait for memory together */
#define ODD 0x9E3779B97F4A7C15ull

enum { FP16, BF16, INT8 };            /* codings (values.py) */
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

#define AVX2 __attribute__((target("avx2,fma,f16c")))
#define AVX512 __attribute__((target("avx512f,avx512bw,avx512vl,avx512dq")))

/* Defines a Sum. BEGIN turns numbers of a vector into fp32, ADD adds those of another, STORE writes the sum. */
#define SUM(NAME, TARGET, REGISTER, WIDTH, BEGIN, ADD, STORE)                                                \
    TARGET INLINE void NAME##_of(                                                                            \
        void *restrict out, const uint8_t *const *vectors, int64_t count, int64_t hidden                     \
    ) {                                                                                                      \
        for (int64_t at = 0; at < hidden; at += WIDTH) {                                                     \
            REGISTER sum = BEGIN(vectors[0]);                                                                \
            for (int64_t i = 1; i < count; i++) sum = ADD(sum, vectors[i]);                                  \
            STORE;                                                                                           \
        }                                                                                                    \
    }                                                                                                        \
    TARGET static void NAME(void *restrict out, const uint8_t *const *vectors, int64_t count, int64_t hidden) { \
        if (count == 3) NAME##_of(out, vectors, 3, hidden);  /* the usual window, unrolled */                \
        else NAME##_of(out, vectors, count, hidden);                                                         \
    }

#define HALF8(v) _mm_loadu_si128((const __m128i *)(v + 2 * at))
#define HALF16(v) _mm256_loadu_si256((const __m256i *)(v + 2 * at))
#define FP16_8(v) _mm256_cvtph_ps(HALF8(v))
#define FP16_16(v) _mm512_cvtph_ps(HALF16(v))
#define BF16_8(v) _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(HALF8(v)), 16))
#define BF16_16(v) _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(HALF16(v)), 16))
#define BYTES8(v) _mm256_cvtepi32_ps(_mm256_cvtepu8_epi32(_mm_loadl_epi64((const __m128i *)(v + at))))
#define BYTES16(v) _mm512_cvtepi32_ps(_mm512_cvtepu8_epi32(_mm_loadu_si128((const __m128i *)(v + at))))
#define TAIL(v, number) ((const float *)(v + hidden) + number)  /* scale and offset; x86 reads them at any place */
#define INT8_8(v) _mm256_fmadd_ps(BYTES8(v), _mm256_broadcast_ss(TAIL(v, 0)), _mm256_broadcast_ss(TAIL(v, 1)))
#define INT8_16(v) _mm512_fmadd_ps(BYTES16(v), _mm512_set1_ps(*TAIL(v, 0)), _mm512_set1_ps(*TAIL(v, 1)))
#define ADD_FP16_8(sum, v) _mm256_add_ps(sum, FP16_8(v))
#define ADD_FP16_16(sum, v) _mm512_add_ps(sum, FP16_16(v))
#define ADD_BF16_8(sum, v) _mm256_add_ps(sum, BF16_8(v))
#define ADD_BF16_16(sum, v) _mm512_add_ps(sum, BF16_16(v))
/* The offset first, as torch does. */
#define ADD_INT8_8(sum, v) \
    _mm256_fmadd_ps(BYTES8(v), _mm256_broadcast_ss(TAIL(v, 0)), _mm256_add_ps(sum, _mm256_broadcast_ss(TAIL(v, 1))))
#define ADD_INT8_16(sum, v) \
    _mm512_fmadd_ps(BYTES16(v), _mm512_set1_ps(*TAIL(v, 0)), _mm512_add_ps(sum, _mm512_set1_ps(*TAIL(v, 1))))
#define STORE8 _mm256_storeu_ps((float *)out + at, sum)
#define STORE16 _mm512_storeu_ps((float *)out + at, sum)
#define ROUND8 _mm_storeu_si128((__m128i *)((uint16_t *)out + at), bf16_of_8(sum))
#define ROUND16 _mm256_storeu_si256((__m256i *)((uint16_t *)out + at), bf16_of_16(sum))

/* To the nearest bf16, ties to even, as torch rounds. */
AVX2 static inline __m128i bf16_of_8(__m256 sum) {
    __m256i bits = _mm256_castps_si256(sum), odd = _mm256_and_si256(_mm256_srli_epi32(bits, 16), _mm256_set1_epi32(1));
    bits = _mm256_srli_epi32(_mm256_add_epi32(bits, _mm256_add_epi32(odd, _mm256_set1_epi32(0x7FFF))), 16);
    __m256i nan = _mm256_castps_si256(_mm256_cmp_ps(sum, sum, _CMP_UNORD_Q));
    bits = _mm256_blendv_epi8(bits, _mm256_set1_epi32(0x7FC0), nan);
    return _mm_packus_epi32(_mm256_castsi256_si128(bits), _mm256_extracti128_si256(bits, 1));
}

AVX512 static inline __m256i bf16_of_16(__m512 sum) {
    __m512i bits = _mm512_castps_si512(sum), odd = _mm512_and_si512(_mm512_srli_epi32(bits, 16), _mm512_set1_epi32(1));
    bits = _mm512_srli_epi32(_mm512_add_epi32(bits, _mm512_add_epi32(odd, _mm512_set1_epi32(0x7FFF))), 16);
    bits = _mm512_mask_mov_epi32(bits, _mm512_cmp_ps_mask(sum, sum, _CMP_UNORD_Q), _mm512_set1_epi32(0x7FC0));
    return _mm512_cvtepi32_epi16(bits);
}

SUM(fp16_to_fp32_avx2, AVX2, __m256, 8, FP16_8, ADD_FP16_8, STORE8)
SUM(bf16_to_fp32_avx2, AVX2, __m256, 8, BF16_8, ADD_BF16_8, STORE8)
SUM(int8_to_fp32_avx2, AVX2, __m256, 8, INT8_8, ADD_INT8_8, STORE8)
SUM(fp16_to_bf16_avx2, AVX2, __m256, 8, FP16_8, ADD_FP16_8, ROUND8)
SUM(bf16_to_bf16_avx2, AVX2, __m256, 8, BF16_8, ADD_BF16_8, ROUND8)
SUM(int8_to_bf16_avx2, AVX2, __m256, 8, INT8_8, ADD_INT8_8, ROUND8)
SUM(fp16_to_fp32_avx512, AVX512, __m512, 16, FP16_16, ADD_FP16_16, STORE16)
SUM(bf16_to_fp32_avx512, AVX512, __m512, 16, BF16_16, ADD_BF16_16, STORE16)
SUM(int8_to_fp32_avx512, AVX512, __m512, 16, INT8_16, ADD_INT8_16, STORE16)
SUM(fp16_to_bf16_avx512, AVX512, __m512, 16, FP16_16, ADD_FP16_16, ROUND16)
SUM(bf16_to_bf16_avx512, AVX512, __m512, 16, BF16_16, ADD_BF16_16, ROUND16)
SUM(int8_to_bf16_avx512, AVX512, __m512, 16, INT8_16, ADD_INT8_16, ROUND16)

/* By instructions, type of the sums, and coding. */
static Sum *const SUMS[2][2][3] = {
    {{fp16_to_fp32_avx2, bf16_to_fp32_avx2, int8_to_fp32_avx2}, {fp16_to_bf16_avx2, bf16_to_bf16_avx2, int8_to_bf16_avx2}},
    {{fp16_to_fp32_avx512, bf16_to_fp32_avx512, int8_to_fp32_avx512},
     {fp16_to_bf16_avx512, bf16_to_bf16_avx512, int8_to_bf16_avx512}},
};

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
    Sum *sum = SUMS[instructions - 1][type][coding];
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
