/* Classes of magnitude, see classes.h. */
#include "codec/classes.h"
#include "codec/bitmap.h"
#include "codec/differ.h"
#include "core/cpu.h"

#include <math.h>

#if defined(__x86_64__)
#include <immintrin.h>
#elif defined(__aarch64__)
#include "codec/neon_masks.h"
#endif

enum { GRADES = 256, BLOCK = 32 /* words whose masks are made at once */, SAMPLED = 256 /* words */ };

#define INLINE static inline __attribute__((always_inline))

INLINE uint32_t magnitude_at(size_t width, const uint8_t *from) {
    uint32_t value = 0; /* the machine is little-endian */
    memcpy(&value, from, width);
    return value & (uint32_t)((UINT64_C(1) << (8 * width - 1)) - 1);
}

INLINE unsigned shift_of(size_t width) {
    return width == 1 ? 0 : 8 * (unsigned)width - 9;
}

INLINE uint32_t least_of(size_t width, const tagc_classes *classes, int c) { /* magnitude */
    return (uint32_t)classes->first[c] << shift_of(width);
}

/* ---- masks ---- */

INLINE void scalar_masks(size_t width, const uint8_t *values, size_t n_words, const tagc_classes *classes,
                         uint64_t *masks) {
    int n = classes->n - 1;
    for (size_t w = 0; w < n_words; w++, masks += n)
        for (int c = 0; c < n; c++) {
            uint32_t least = least_of(width, classes, c + 1);
            uint64_t word = 0;
            for (size_t i = 0; i < 64; i++)
                word |= (uint64_t)(magnitude_at(width, values + (64 * w + i) * width) >= least) << i;
            masks[c] = word;
        }
}

#define AT_LEAST(level, features)                                                                            \
    features static void level##_at_least(size_t width, const uint8_t *values, size_t n_words,               \
                                          const tagc_classes *classes, uint64_t *masks) {                    \
        TAGC_BY_WIDTH(width, level##_masks, values, n_words, classes, masks);                                \
    }

AT_LEAST(scalar, )

static const tagc_classes_kernels scalar_kernels = {"scalar", scalar_at_least};

#if defined(__x86_64__)
#define AVX2 __attribute__((target("avx2,popcnt,bmi,bmi2"), always_inline)) static inline
#define AVX512 __attribute__((target("avx512f,avx512bw"), always_inline)) static inline

AVX2 __m256i avx2_magnitudes(size_t width, const uint8_t *from) {
    const __m256i mask = width == 1   ? _mm256_set1_epi8(0x7f)
                         : width == 2 ? _mm256_set1_epi16(0x7fff)
                                      : _mm256_set1_epi32(0x7fffffff);
    return _mm256_and_si256(_mm256_loadu_si256((const void *)from), mask);
}

/* All bits of those of 16 magnitudes that are larger, as 2 bytes each. Those of 4 bytes are in two vectors, and packs leaves quarters out
 * of order. */
AVX2 __m256i avx2_above16(size_t width, const __m256i *values, __m256i most) {
    if (width == 2) return _mm256_cmpgt_epi16(values[0], most);
    __m256i low = _mm256_cmpgt_epi32(values[0], most), high = _mm256_cmpgt_epi32(values[1], most);
    return _mm256_permute4x64_epi64(_mm256_packs_epi32(low, high), 0xd8);
}

/* Bit i: magnitude i of 32 is larger. */
AVX2 uint64_t avx2_above(size_t width, const __m256i *values, __m256i most) {
    if (width == 1) return (uint32_t)_mm256_movemask_epi8(_mm256_cmpgt_epi8(values[0], most));
    __m256i low = avx2_above16(width, values, most), high = avx2_above16(width, values + width / 2, most);
    __m256i bytes = _mm256_permute4x64_epi64(_mm256_packs_epi16(low, high), 0xd8);
    return (uint32_t)_mm256_movemask_epi8(bytes);
}

AVX2 void avx2_masks(size_t width, const uint8_t *values, size_t n_words, const tagc_classes *classes,
                     uint64_t *masks) {
    __m256i most[TAGC_CLASSES_MAX], word[8];
    int n = classes->n - 1;
    for (int c = 0; c < n; c++) {
        uint32_t below = least_of(width, classes, c + 1) - 1; /* a class above the first begins above 0 */
        if (width == 1 && below > 0x7f) below = 0x7f;         /* compared as a number with a sign */
        most[c] = width == 1   ? _mm256_set1_epi8((char)below)
                  : width == 2 ? _mm256_set1_epi16((short)below)
                               : _mm256_set1_epi32((int)below);
    }
    for (size_t w = 0; w < n_words; w++, values += 64 * width, masks += n) {
        for (size_t i = 0; i < 2 * width; i++) word[i] = avx2_magnitudes(width, values + 32 * i);
        for (int c = 0; c < n; c++)
            masks[c] = avx2_above(width, word, most[c]) | avx2_above(width, word + width, most[c]) << 32;
    }
}

AVX512 uint64_t avx512_mask(size_t width, const __m512i *values, __m512i least) {
    if (width == 1) return _mm512_cmpge_epu8_mask(values[0], least);
    uint64_t mask = 0;
    for (size_t i = 0; i < width; i++)
        mask |= width == 2 ? (uint64_t)_mm512_cmpge_epu16_mask(values[i], least) << 32 * i
                           : (uint64_t)_mm512_cmpge_epu32_mask(values[i], least) << 16 * i;
    return mask;
}

AVX512 void avx512_masks(size_t width, const uint8_t *values, size_t n_words, const tagc_classes *classes,
                         uint64_t *masks) {
    const __m512i magnitude = width == 1   ? _mm512_set1_epi8(0x7f)
                              : width == 2 ? _mm512_set1_epi16(0x7fff)
                                           : _mm512_set1_epi32(0x7fffffff);
    __m512i least[TAGC_CLASSES_MAX], word[4];
    int n = classes->n - 1;
    for (int c = 0; c < n; c++) {
        uint32_t from = least_of(width, classes, c + 1);
        least[c] = width == 1   ? _mm512_set1_epi8((char)from)
                   : width == 2 ? _mm512_set1_epi16((short)from)
                                : _mm512_set1_epi32((int)from);
    }
    for (size_t w = 0; w < n_words; w++, values += 64 * width, masks += n) {
        for (size_t i = 0; i < width; i++)
            word[i] = _mm512_and_si512(_mm512_loadu_si512(values + 64 * i), magnitude);
        for (int c = 0; c < n; c++) masks[c] = avx512_mask(width, word, least[c]);
    }
}

AT_LEAST(avx2, __attribute__((target("avx2,popcnt,bmi,bmi2"))))
AT_LEAST(avx512, __attribute__((target("avx512f,avx512bw"))))

static const tagc_classes_kernels avx2_kernels = {"avx2", avx2_at_least};
static const tagc_classes_kernels avx512_kernels = {"avx512", avx512_at_least};
#elif defined(__aarch64__)
/* Bytes that are all ones where 16 magnitudes are at least `least`. */
NEON uint8x16_t neon_at_least16(size_t width, const uint8_t *from, uint32_t least) {
    if (width == 1) return vcgeq_u8(vandq_u8(vld1q_u8(from), vdupq_n_u8(0x7f)), vdupq_n_u8((uint8_t)least));
    uint32x4_t above[4];
    for (size_t i = 0; i < width; i++) {
        uint8x16_t values = vld1q_u8(from + 16 * i);
        uint16x8_t of2 = vandq_u16(vreinterpretq_u16_u8(values), vdupq_n_u16(0x7fff));
        uint32x4_t of4 = vandq_u32(vreinterpretq_u32_u8(values), vdupq_n_u32(0x7fffffff));
        above[i] = width == 2 ? vreinterpretq_u32_u16(vcgeq_u16(of2, vdupq_n_u16((uint16_t)least)))
                              : vcgeq_u32(of4, vdupq_n_u32(least));
    }
    return width == 2 ? neon_narrow16(vreinterpretq_u16_u32(above[0]), vreinterpretq_u16_u32(above[1]))
                      : neon_narrow32(above);
}

NEON void neon_masks(size_t width, const uint8_t *values, size_t n_words, const tagc_classes *classes,
                     uint64_t *masks) {
    int n = classes->n - 1;
    for (size_t w = 0; w < n_words; w++, values += 64 * width, masks += n)
        for (int c = 0; c < n; c++) {
            uint32_t least = least_of(width, classes, c + 1);
            uint8x16_t bytes[4];
            for (size_t i = 0; i < 4; i++) bytes[i] = neon_at_least16(width, values + 16 * width * i, least);
            masks[c] = neon_word_of(bytes);
        }
}

AT_LEAST(neon, )

static const tagc_classes_kernels neon_kernels = {"neon", neon_at_least};
#endif

const tagc_classes_kernels *const *tagc_classes_kernels_all(void) {
    static const tagc_classes_kernels *const all[] = {
#if defined(__x86_64__)
        &avx512_kernels,
        &avx2_kernels,
#elif defined(__aarch64__)
        &neon_kernels,
#endif
        &scalar_kernels,
        NULL
    };
    size_t n_lacking = 0;
#if defined(__x86_64__)
    n_lacking = tagc_cpu_has(TAGC_CPU_AVX512) ? 0 : tagc_cpu_has(TAGC_CPU_AVX2) ? 1 : 2;
#elif defined(__aarch64__)
    n_lacking = tagc_cpu_has(TAGC_CPU_NEON) ? 0 : 1;
#endif
    return all + n_lacking;
}

/* ---- a walk through the words of an array ---- */

typedef struct walk {
    const tagc_classes_kernels *kernels;
    size_t width, n;
    const tagc_classes *classes;
    const uint8_t *values;
    uint8_t class_of[GRADES];
    uint64_t masks[BLOCK * (TAGC_CLASSES_MAX - 1)];
} walk;

/* Makes the masks of up to BLOCK words from word w on; returns how many. The last word may be short, and has zeros behind it. */
static size_t next_masks(walk *k, size_t w) {
    size_t n_whole = k->n / 64, n_words = n_whole - w < BLOCK ? n_whole - w : BLOCK;
    uint8_t last[64 * 4] = {0};
    const uint8_t *from = k->values + 64 * w * k->width;
    if (n_words == 0) {
        memcpy(last, from, k->n % 64 * k->width);
        from = last;
        n_words = 1;
    }
    if (k->classes->n > 1) k->kernels->at_least(k->width, from, n_words, k->classes, k->masks);
    return n_words;
}

INLINE uint64_t elements_of(const walk *k, size_t w) { /* a bit for each that is in the array */
    size_t n = k->n - 64 * w;
    return n >= 64 ? ~UINT64_C(0) : (UINT64_C(1) << n) - 1;
}

INLINE uint64_t of_class(const walk *k, const uint64_t *masks, int c, uint64_t elements) {
    uint64_t from = c ? masks[c - 1] : elements, above = c + 1 < k->classes->n ? masks[c] : 0;
    return from & ~above & elements;
}

INLINE void split_as(size_t width, walk *k, const uint8_t *bits, tagc_class_items *of) {
    uint32_t n_from[TAGC_CLASSES_MAX + 1] = {0}, next[TAGC_CLASSES_MAX] = {
                                                     0}; /* n_from: of this class or a higher one */
    size_t n_items[TAGC_CLASSES_MAX] = {0}, n_here;
    int n_masks = k->classes->n - 1;
    unsigned shift = shift_of(width);
    for (size_t first = 0; 64 * first < k->n; first += n_here) {
        n_here = next_masks(k, first);
        for (size_t w = first; w < first + n_here; w++) {
            const uint64_t *masks = k->masks + (w - first) * (size_t)n_masks;
            for (uint64_t left = tagc_load_word(bits + 8 * w); left; left &= left - 1) {
                unsigned bit = (unsigned)__builtin_ctzll(left);
                size_t item = 64 * w + bit;
                int c = k->class_of[magnitude_at(width, k->values + item * width) >> shift];
                uint64_t below = of_class(k, masks, c, (UINT64_C(1) << bit) - 1);
                uint32_t number = n_from[c] - n_from[c + 1] + (uint32_t)__builtin_popcountll(below);
                of[c].items[n_items[c]] = (uint32_t)item;
                of[c].gaps[n_items[c]++] = number - next[c];
                next[c] = number + 1;
            }
            n_from[0] += 64; /* the last word may have fewer, and none comes behind it */
            for (int c = 0; c < n_masks; c++) n_from[c + 1] += (uint32_t)__builtin_popcountll(masks[c]);
        }
    }
}

INLINE void split_by(walk *k, const uint8_t *bits, tagc_class_items *of) {
    TAGC_BY_WIDTH(k->width, split_as, k, bits, of);
}

/* The place of set bit `number` of a word. */
INLINE unsigned place_of(uint64_t mask, uint64_t number) {
    for (; number > 0; number--) mask &= mask - 1;
    return (unsigned)__builtin_ctzll(mask);
}

INLINE int join_by(walk *k, const tagc_class_items *of, int n_lists, unsigned (*place)(uint64_t, uint64_t)) {
    uint64_t n_before[TAGC_CLASSES_MAX] = {0}, soonest[TAGC_CLASSES_MAX] = {0}; /* next of its lists */
    uint64_t next[TAGC_CLASS_LISTS_MAX] = {0};
    size_t n_items[TAGC_CLASS_LISTS_MAX] = {0}, n_here;
    int n_masks = k->classes->n - 1, is_complete = 1, begin[TAGC_CLASSES_MAX + 1];
    for (int i = n_lists - 1; i >= 0; i--) {
        next[i] = of[i].n ? of[i].gaps[0] : UINT64_MAX;
        begin[of[i].c] = i;
    }
    begin[n_masks + 1] = n_lists;
    for (size_t first = 0; 64 * first < k->n; first += n_here) {
        n_here = next_masks(k, first);
        for (size_t w = first; w < first + n_here; w++) {
            const uint64_t *masks = k->masks + (w - first) * (size_t)n_masks;
            uint64_t elements = elements_of(k, w);
            for (int c = 0; c <= n_masks; c++) {
                uint64_t mask = of_class(k, masks, c, elements);
                uint64_t n_behind = n_before[c] + (uint64_t)__builtin_popcountll(mask), later = UINT64_MAX;
                for (int i = begin[c]; soonest[c] < n_behind && i < begin[c + 1]; i++) {
                    while (next[i] < n_behind) {
                        of[i].items[n_items[i]] = (uint32_t)(64 * w + place(mask, next[i] - n_before[c]));
                        if (++n_items[i] < of[i].n)
                            next[i] += 1 + (uint64_t)of[i].gaps[n_items[i]];
                        else
                            next[i] = UINT64_MAX;
                    }
                    later = next[i] < later ? next[i] : later;
                }
                if (soonest[c] < n_behind) soonest[c] = later;
                n_before[c] = n_behind;
            }
        }
    }
    for (int i = 0; i < n_lists; i++) is_complete &= n_items[i] == of[i].n;
    return is_complete;
}

static void split_plain(walk *k, const uint8_t *bits, tagc_class_items *of) {
    split_by(k, bits, of);
}

static unsigned place_plain(uint64_t mask, uint64_t number) {
    return place_of(mask, number);
}

static int join_plain(walk *k, const tagc_class_items *of, int n_lists) {
    return join_by(k, of, n_lists, place_plain);
}

#if defined(__x86_64__)
#define WITH_BMI __attribute__((target("avx2,popcnt,bmi,bmi2")))

static int is_scalar(const tagc_classes_kernels *kernels) {
    return kernels == &scalar_kernels;
}

WITH_BMI static void split_avx2(walk *k, const uint8_t *bits, tagc_class_items *of) {
    split_by(k, bits, of);
}

WITH_BMI static inline unsigned place_avx2(uint64_t mask, uint64_t number) {
    return (unsigned)_tzcnt_u64(_pdep_u64(UINT64_C(1) << number, mask));
}

WITH_BMI static int join_avx2(walk *k, const tagc_class_items *of, int n_lists) {
    return join_by(k, of, n_lists, place_avx2);
}
#endif

void tagc_classes_split(const tagc_classes_kernels *kernels, size_t width, const tagc_classes *classes,
                        const uint8_t *values, const uint8_t *bits, size_t n, tagc_class_items *of) {
    walk k = {.kernels = kernels, .width = width, .n = n, .classes = classes, .values = values};
    for (int grade = 0, c = 0; grade < GRADES; grade++) {
        while (c + 1 < classes->n && grade >= classes->first[c + 1]) c++;
        k.class_of[grade] = (uint8_t)c;
    }
#if defined(__x86_64__)
    if (!is_scalar(kernels)) {
        split_avx2(&k, bits, of);
        return;
    }
#endif
    split_plain(&k, bits, of);
}

int tagc_classes_join(const tagc_classes_kernels *kernels, size_t width, const tagc_classes *classes,
                      const uint8_t *values, size_t n, const tagc_class_items *of, int n_lists) {
    walk k = {.kernels = kernels, .width = width, .n = n, .classes = classes, .values = values};
#if defined(__x86_64__)
    if (!is_scalar(kernels)) return join_avx2(&k, of, n_lists);
#endif
    return join_plain(&k, of, n_lists);
}

/* ---- which classes ---- */

/* Grades from `first` on, to the next range, and what is in them. */
typedef struct range {
    double n_elems, n_items, loss; /* loss: bits by which both take more when the next range joins this one */
    uint8_t first;
} range;

static double x_log_x(double x) {
    return x > 0 ? x * log2(x) : 0;
}

double tagc_places_bits(double n_elems, double n_items) {
    return x_log_x(n_elems) - x_log_x(n_items) - x_log_x(n_elems - n_items);
}

static void set_loss(range *ranges, int i) {
    const range *a = ranges + i, *b = a + 1;
    ranges[i].loss = tagc_places_bits(a->n_elems + b->n_elems, a->n_items + b->n_items) -
                     tagc_places_bits(a->n_elems, a->n_items) - tagc_places_bits(b->n_elems, b->n_items);
}

/* Joins neighbours for as long as that saves more than it loses, and there are too many. */
static int join_ranges(range *ranges, int n, double table_bits) {
    for (int i = 0; i + 1 < n; i++) set_loss(ranges, i);
    while (n > 1) {
        int least = 0;
        for (int i = 1; i + 1 < n; i++)
            if (ranges[i].loss < ranges[least].loss) least = i;
        if (n <= TAGC_CLASSES_MAX && ranges[least].loss > table_bits) break;
        ranges[least].n_elems += ranges[least + 1].n_elems;
        ranges[least].n_items += ranges[least + 1].n_items;
        memmove(ranges + least + 1, ranges + least + 2, (size_t)(n - least - 2) * sizeof *ranges);
        n--;
        if (least + 1 < n) set_loss(ranges, least);
        if (least > 0) set_loss(ranges, least - 1);
    }
    return n;
}

INLINE void count_as(size_t width, const uint8_t *values, const uint8_t *bits, size_t n, uint32_t *n_elems,
                     uint32_t *n_items) {
    unsigned shift = shift_of(width);
    size_t n_words = (n + 63) / 64, stride = 1 + n_words / SAMPLED;
    for (size_t w = 0; w < n_words; w++)
        for (uint64_t left = tagc_load_word(bits + 8 * w); left; left &= left - 1) {
            size_t at = 64 * w + (size_t)__builtin_ctzll(left);
            n_items[magnitude_at(width, values + at * width) >> shift]++;
        }
    for (size_t w = 0; w < n_words; w += stride) {
        size_t end = 64 * w + 64 < n ? 64 * w + 64 : n;
        for (size_t i = 64 * w; i < end; i++) n_elems[magnitude_at(width, values + i * width) >> shift]++;
    }
}

void tagc_classes_choose(size_t width, const uint8_t *values, const uint8_t *bits, size_t n,
                         double table_bits, tagc_classes *classes, tagc_class_items *of) {
    uint32_t n_elems[GRADES] = {0}, n_items[GRADES] = {0};
    range ranges[GRADES];
    int n_ranges = 0;
    TAGC_BY_WIDTH(width, count_as, values, bits, n, n_elems, n_items);
    uint64_t n_skipped = (n + 63) / 64 / SAMPLED;
    double stride = 1 + (double)n_skipped;
    for (int grade = 0; grade < GRADES; grade++) {
        if (!n_elems[grade] && !n_items[grade]) continue;
        double most = stride * n_elems[grade];
        ranges[n_ranges++] = (range){.n_elems = most > n_items[grade] ? most : n_items[grade],
                                     .n_items = n_items[grade],
                                     .first = (uint8_t)grade};
    }
    classes->n = n_ranges > 0 ? join_ranges(ranges, n_ranges, table_bits) : 1;
    for (int c = 0; c < classes->n; c++) {
        classes->first[c] = c ? ranges[c].first : 0;
        of[c].n = 0;
    }
    for (int grade = 0, c = 0; grade < GRADES; grade++) {
        while (c + 1 < classes->n && grade >= classes->first[c + 1]) c++;
        of[c].n += n_items[grade];
    }
}
