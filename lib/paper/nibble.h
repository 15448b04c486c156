/* LHC's index: four bits per element, which ranks add up. */
#ifndef TAGC_PAPER_NIBBLE_H
#define TAGC_PAPER_NIBBLE_H

#include <stddef.h>
#include <stdint.h>

/* Element i is nibble i % 2 (low first) of byte i / 2; counts add up, at most 15 ranks. */
size_t tagc_nibble_bytes(size_t n); /* padded to 8 */
void tagc_nibble_make(uint8_t *nibbles, size_t n, const uint32_t *indices, size_t n_indices);
void tagc_nibble_add(uint8_t *into, const uint8_t *from, size_t n);
void tagc_nibble_to_bitmap(const uint8_t *nibbles, size_t n, uint8_t *bits); /* bit = count != 0 */

#endif
