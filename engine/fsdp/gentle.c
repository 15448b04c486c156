/* The gentle start, in three stages: if the weights are random, a flat sends every value in 8 bits for 60 updates; then it
 * sends every value in 4 bits, and uses Adam's first moment; it begins to select values when two looks in a row have found
 * its gradients to be mostly noise.
 *
 * In the first updates of random weights, the rounding errors of 4 bits can make the gradient of an unclipped run jump, and
 * the run then stays behind (docs/studies/first-try.md). The caller says that weights are random; a checkpoint says which stage its
 * flats were in.
 *
 * A value that is not selected waits in the residual. If gradients are mostly noise, waiting costs nothing. If they point
 * the same way step after step, as in a model that has just begun to learn, Adam takes one step for the waiting sum in
 * place of many, and training falls behind. Adam's moments tell the two cases apart: m^2 / v of an element is
 * (1 - beta1) / (1 + beta1) for noise and 1 for a constant gradient. All elements count alike, as in Adam's steps, except
 * those with almost no gradient, such as rows of an embedding that the text never uses. A bucket ends its start when each
 * of its stages may: a mean over the bucket would hide a stage that still learns fast. All ranks decide from the same
 * sums. One message carries the sums of all flats. */
#include "exchange/options.h"
#include "fsdp/internal.h"
#include <math.h>
#include <stdlib.h>
#include <string.h>

#define FAINT 0.03         /* times the root mean square of the stage: smaller elements do not count */
#define MOST_COHERENCE 1.3 /* times that of noise: a stage with more stays gentle */
enum {
    LOOK_EVERY = 20, /* updates; divides TAGC_FRESH_UPDATES */
    BLOCK = 32 /* values that share a scale in 4 bits; among more, small ones arrive late and in bursts */
};

int tagc_fsdp_can_be_gentle(const tagc_fsdp *f, const tagc_flat *flat) {
    if (!f->options.gentle || !(f->options.beta1 > 0) || flat->is_asked || flat->class_ == TAGC_CLASS_DENSE)
        return 0;
    tagc_reducer_options o = flat->class_ == TAGC_CLASS_MILD ? f->options.mild : f->options.reducer;
    tagc_reducer_options_resolve(&o);
    return o.exchange == TAGC_EXCHANGE_DIRECT && o.sparsity > 0;
}

void tagc_fsdp_gentle_options(tagc_gentle stage, tagc_reducer_options *options) {
    if (stage == TAGC_GENTLE_OVER) return;
    options->sparsity = 0;
    options->format = stage == TAGC_GENTLE_FRESH ? TAGC_FORMAT_INT8 : TAGC_FORMAT_INT4;
    if (stage == TAGC_GENTLE_4_BITS && (options->block == 0 || options->block > BLOCK))
        options->block = BLOCK;
}

typedef struct tagc_coherence {
    double signal, count; /* a sum, and the number of its elements */
} tagc_coherence;

/* A part is the members [first, end) of a flat that belong to one stage. Returns the end of the part that begins at
 * `first`. */
static int end_of_part(const tagc_fsdp *f, const tagc_flat *flat, int first) {
    int end = first + 1;
    while (end < flat->first_member + flat->n_members &&
           f->tables.tensors[f->tables.members[end]].stage ==
               f->tables.tensors[f->tables.members[first]].stage)
        end++;
    return end;
}

int tagc_fsdp_n_parts(const tagc_fsdp *f, const tagc_flat *flat) {
    int n = 0, end = flat->first_member + flat->n_members;
    for (int i = flat->first_member; i < end; i = end_of_part(f, flat, i)) n++;
    return n;
}

/* The sum of v over this rank's share of a part. */
static tagc_coherence squares_of(const tagc_fsdp *f, const tagc_flat *flat, int first, int end) {
    tagc_coherence own = {0};
    for (int i = first; i < end; i++) {
        const tagc_place *p = &f->tables.places[f->tables.members[i]];
        for (uint64_t k = 0; k < p->n; k++) own.signal += (double)flat->moment2[p->at + k];
        own.count += (double)p->n;
    }
    return own;
}

/* The sum of m^2 / v over elements with v above `least`. */
static tagc_coherence coherence_of(const tagc_fsdp *f, const tagc_flat *flat, int first, int end,
                                   double least) {
    tagc_coherence own = {0};
    for (int i = first; i < end; i++) {
        const tagc_place *p = &f->tables.places[f->tables.members[i]];
        for (uint64_t k = 0; k < p->n; k++) {
            double v = (double)flat->moment2[p->at + k], m = (double)flat->moment1[p->at + k];
            if (v <= least) continue;
            own.signal += m * m / v;
            own.count++;
        }
    }
    return own;
}

/* Sums of all parts of flats in 4 bits, in order: of v if mean_squares is NULL, else of m^2 / v. Returns their number. */
static int sum_up(const tagc_fsdp *f, const double *mean_squares, tagc_coherence *own) {
    int n = 0;
    for (int i = 0; i < f->tables.n_flats; i++) {
        const tagc_flat *flat = &f->tables.flats[i];
        if (flat->gentle != TAGC_GENTLE_4_BITS) continue;
        for (int first = flat->first_member, end; first < flat->first_member + flat->n_members; first = end) {
            end = end_of_part(f, flat, first);
            own[n] = mean_squares ? coherence_of(f, flat, first, end, FAINT * FAINT * mean_squares[n])
                                  : squares_of(f, flat, first, end);
            n++;
        }
    }
    return n;
}

/* Means (n) over all ranks, added in rank order, so that all ranks get the same bits; 0 if there are no elements.
 * own (n), all (W, n). */
static tagc_status mean_of(tagc_fsdp *f, const tagc_coherence *own, int n, tagc_coherence *all,
                           double *means) {
    TAGC_TRY(tagc_comm_all_gather(f->comm, own, (size_t)n * sizeof *own, all));
    for (int part = 0; part < n; part++) {
        double signal = 0, count = 0;
        for (int rank = 0; rank < f->world_size; rank++) {
            signal += all[(size_t)rank * (size_t)n + (size_t)part].signal;
            count += all[(size_t)rank * (size_t)n + (size_t)part].count;
        }
        means[part] = count > 0 ? signal / count : 0;
    }
    return TAGC_OK;
}

/* m^2 / v of noise after so many updates of two moments that began at zero. */
static double noise(const tagc_fsdp_options *o, uint64_t n_updates) {
    double t = (double)n_updates, b1 = o->beta1, b2 = o->beta2;
    double m = (1 - b1) / (1 + b1) * (1 - pow(b1, 2 * t)), v = 1 - pow(b2, t);
    return m / v;
}

static tagc_status enter(tagc_fsdp *f, int index, tagc_gentle stage) {
    tagc_flat changed = f->tables.flats[index];
    changed.gentle = stage;
    changed.noise_since = 0;
    return tagc_fsdp_change_exchange(f, index, &changed);
}

/* A step that was skipped may be followed by another look after the same number of updates: that decides nothing new. */
static tagc_status decide(tagc_fsdp *f, int index, int is_noise) {
    tagc_flat *flat = &f->tables.flats[index];
    if (is_noise && flat->noise_since > 0 && flat->noise_since < f->n_updates)
        return enter(f, index, TAGC_GENTLE_OVER);
    if (!is_noise)
        flat->noise_since = 0;
    else if (flat->noise_since == 0)
        flat->noise_since = f->n_updates;
    return TAGC_OK;
}

/* Collective. */
static tagc_status look(tagc_fsdp *f) {
    double most = MOST_COHERENCE * noise(&f->options, f->n_updates), *means = f->coherences;
    tagc_coherence *own = (tagc_coherence *)(means + 2 * f->n_parts), *all = own + f->n_parts;
    int n = sum_up(f, NULL, own);
    if (n == 0) return TAGC_OK;
    TAGC_TRY(mean_of(f, own, n, all, means));
    sum_up(f, means, own);
    TAGC_TRY(mean_of(f, own, n, all, means));
    for (int i = 0; i < f->tables.n_flats; i++) {
        int is_noise = 1, is_known = 0;
        if (f->tables.flats[i].gentle != TAGC_GENTLE_4_BITS) continue;
        for (int k = tagc_fsdp_n_parts(f, &f->tables.flats[i]); k > 0; k--, means++) {
            is_noise &= *means < most;
            is_known |= *means > 0;
        }
        TAGC_TRY(decide(f, i, is_noise && is_known));
    }
    return TAGC_OK;
}

tagc_status tagc_fsdp_begin_gentle(tagc_fsdp *f) {
    if (f->n_gentle == 0 || f->n_updates == 0 || f->n_updates % LOOK_EVERY != 0) return TAGC_OK;
    TAGC_TRY(look(f));
    for (int i = 0; i < f->tables.n_flats && f->n_updates >= TAGC_FRESH_UPDATES; i++)
        if (f->tables.flats[i].gentle == TAGC_GENTLE_FRESH) TAGC_TRY(enter(f, i, TAGC_GENTLE_4_BITS));
    return TAGC_OK;
}

tagc_status tagc_fsdp_load_gentle(tagc_fsdp *f, int index, tagc_gentle stage, uint64_t noise_since) {
    tagc_flat *flat = &f->tables.flats[index];
    if (flat->gentle == TAGC_GENTLE_OVER) return TAGC_OK;
    if (flat->gentle != stage) TAGC_TRY(enter(f, index, stage));
    flat->noise_since = noise_since;
    return TAGC_OK;
}
