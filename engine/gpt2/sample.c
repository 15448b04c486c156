/* Drawing the next token from logits. */
#include "gpt2/gpt2.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

static int descending(const void *a, const void *b) {
    float x = *(const float *)a, y = *(const float *)b;
    return (x < y) - (x > y);
}

/* Uniform in [0, 1); the state is a counter, its hash the value. */
static double next_uniform(uint64_t *rng) {
    uint64_t x = *rng += 0x9e3779b97f4a7c15u;
    x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9u;
    x = (x ^ (x >> 27)) * 0x94d049bb133111ebu;
    return (double)((x ^ (x >> 31)) >> 11) * 0x1p-53;
}

int tagc_gpt2_sample(const float *logits, int n_vocab, double temperature, int top_k, uint64_t *rng,
                     float *scratch) {
    int largest = 0;
    for (int i = 1; i < n_vocab; i++)
        if (logits[i] > logits[largest]) largest = i;
    if (!(temperature > 0)) return largest;

    float least = -INFINITY;
    if (top_k > 0 && top_k < n_vocab) {
        memcpy(scratch, logits, (size_t)n_vocab * sizeof *scratch);
        qsort(scratch, (size_t)n_vocab, sizeof *scratch, descending);
        least = scratch[top_k - 1];
    }
    double sum = 0;
    for (int i = 0; i < n_vocab; i++) {
        double weight = logits[i] >= least ? exp(((double)logits[i] - logits[largest]) / temperature) : 0;
        scratch[i] = (float)weight;
        sum += scratch[i];
    }
    double left = next_uniform(rng) * sum;
    for (int i = 0; i < n_vocab; i++) {
        left -= scratch[i];
        if (left < 0) return i;
    }
    return largest;
}
