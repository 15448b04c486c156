/* Elements of a caller's array as fp32, and back: runs of them, which lie elsewhere there. */
#ifndef TAGC_GPU_ELEMENTS_H
#define TAGC_GPU_ELEMENTS_H

#include "tagc/device.h"

/* Bytes of one; 0: there is no such tagc_element. */
size_t tagc_element_bytes(int element);

/* n elements from number `first` of an array. Narrowing is to nearest, ties to even. */
void tagc_elements_read(const void *array, int element, uint64_t first, uint64_t n, float *to);
void tagc_elements_write(const float *from, void *array, int element, uint64_t first, uint64_t n);

/* The sum of their squares. */
double tagc_elements_square(const void *array, int element, uint64_t first, uint64_t n);

#endif
