/* Elements in classes of magnitude, of which each has changes of its own number: a step moves all weights about as far, and units in the
 * last place are small where weights are. Both sides see the classes in what an array was before.
 *
 * The grade of an element is the highest 8 bits of its magnitude, which is what is not the sign: the exponent of a bf16 or an fp32. (An
 * element of 1 byte has 7 bits.) A class is a range of grades. Within its class an element has a number, in the order of the array. */
#ifndef TAGC_CODEC_CLASSES_H
#define TAGC_CODEC_CLASSES_H

#include <stddef.h>
#include <stdint.h>

enum { TAGC_CLASSES_MAX = 16, TAGC_CLASS_LISTS_MAX = 64 };

typedef struct tagc_classes {
    int n;                           /* 1 to TAGC_CLASSES_MAX */
    uint8_t first[TAGC_CLASSES_MAX]; /* the lowest grade of each, ascending from 0 */
} tagc_classes;

/* What changed in one class, or some of it. */
typedef struct tagc_class_items {
    int c; /* which class; of lists that are joined, several may be of one */
    size_t n;
    uint32_t *gaps;  /* (n) the elements of the class between an item and the one before it */
    uint32_t *items; /* (n) positions in the array, ascending */
} tagc_class_items;

/* The inner loop, one table per processor level. All give the same masks. */
typedef struct tagc_classes_kernels {
    const char *name;
    /* Bit i of masks[w * (n - 1) + c - 1]: element 64 * w + i of n_words * 64 is of class c or a higher one; c from 1 to n - 1. */
    void (*at_least)(size_t width, const uint8_t *values, size_t n_words, const tagc_classes *classes,
                     uint64_t *masks);
} tagc_classes_kernels;

/* NULL-terminated, best first: what this processor can run. */
const tagc_classes_kernels *const *tagc_classes_kernels_all(void);

/* The bits that tell which n_items of n_elems elements are items. */
double tagc_places_bits(double n_elems, double n_items);

/* Finds the classes that take the fewest bits, by a sample of the elements and all items, and sets the n of each. values (n): what the
 * array was before. bits: tagc_bitmap_bytes(n), where it changed. table_bits: what each class costs. */
void tagc_classes_choose(size_t width, const uint8_t *values, const uint8_t *bits, size_t n,
                         double table_bits, tagc_classes *classes, tagc_class_items *of);

/* Writes gaps and items of each class, a list of each with as many as tagc_classes_choose counts. */
void tagc_classes_split(const tagc_classes_kernels *kernels, size_t width, const tagc_classes *classes,
                        const uint8_t *values, const uint8_t *bits, size_t n, tagc_class_items *of);

/* Writes the items of n_lists lists, ordered by class, of each one or more, from their gaps; both may be the same memory. Accepts any gaps and values: returns 0
 * if a class has not so many elements, and items are undefined then. */
int tagc_classes_join(const tagc_classes_kernels *kernels, size_t width, const tagc_classes *classes,
                      const uint8_t *values, size_t n, const tagc_class_items *of, int n_lists);

#endif
