/* Flats that begin gently: every value travels, in 4 bits, and Adam's first moment is on, until their gradients are what
 * selection is made for.
 *
 * A selected value waits in the residual until it is large. Where gradients are mostly noise that costs nothing. Where
 * they point the same way step after step, as in a model that has just begun to learn, Adam makes one step of what
 * would have been many, and training falls behind. Adam's own moments tell which it is: m^2 / v of an element is
 * (1 - beta1) / (1 + beta1) for noise and 1 for a gradient that does not change. Elements count alike, as in Adam's
 * steps, but for those whose gradient is next to nothing, such as rows of an embedding that the text never uses. All
 * ranks decide from the same sums. */
#include "exchange/options.h"
#include "fsdp/internal.h"
#include <math.h>
#include <stdlib.h>
#include <string.h>

#define FAINT 0.03         /* elements below this times the root mean square of their flat do not count */
#define MOST_COHERENCE 1.3 /* of a flat that may go on, times that of noise */
enum { LOOK_EVERY = 20 };  /* updates */

int tagc_fsdp_can_be_gentle(const tagc_fsdp *f, const tagc_flat *flat) {
    if (!f->options.gentle || !(f->options.beta1 > 0) || flat->is_asked || flat->class_ == TAGC_CLASS_DENSE)
        return 0;
    tagc_reducer_options o = flat->class_ == TAGC_CLASS_MILD ? f->options.mild : f->options.reducer;
    tagc_reducer_options_resolve(&o);
    return o.exchange == TAGC_EXCHANGE_DIRECT && o.sparsity > 0;
}

void tagc_fsdp_gentle_options(tagc_reducer_options *options) {
    options->sparsity = 0;
    options->format = TAGC_FORMAT_INT4;
}

typedef struct tagc_coherence {
    double signal, count; /* a sum, over so many elements */
} tagc_coherence;

/* Of what this rank owns of the flat, without padding. */
static uint64_t owned_elems(const tagc_flat *flat) {
    if (flat->first_owned >= flat->n_elems) return 0;
    uint64_t n = flat->n_elems - flat->first_owned;
    return n < flat->n_owned ? n : flat->n_owned;
}

/* The sum of v. */
static tagc_coherence squares_of(const tagc_flat *flat) {
    tagc_coherence own = {0, (double)owned_elems(flat)};
    for (uint64_t i = 0; i < owned_elems(flat); i++) own.signal += (double)flat->moment2[i];
    return own;
}

/* The sum of m^2 / v where v is above `least`. */
static tagc_coherence coherence_of(const tagc_flat *flat, double least) {
    tagc_coherence own = {0};
    for (uint64_t i = 0; i < owned_elems(flat); i++) {
        double v = (double)flat->moment2[i], m = (double)flat->moment1[i];
        if (v <= least) continue;
        own.signal += m * m / v;
        own.count++;
    }
    return own;
}

/* The mean over all ranks, in rank order: the same bits on each. 0 of nothing. */
static tagc_status mean_of(tagc_fsdp *f, tagc_coherence own, double *mean) {
    const tagc_coherence *all = (const tagc_coherence *)f->coherences;
    double signal = 0, count = 0;
    TAGC_TRY(tagc_comm_all_gather(f->comm, &own, sizeof own, f->coherences));
    for (int rank = 0; rank < f->world_size; rank++) {
        signal += all[rank].signal;
        count += all[rank].count;
    }
    *mean = count > 0 ? signal / count : 0;
    return TAGC_OK;
}

/* What m^2 / v is for noise after so many updates, both moments having begun at zero. */
static double noise(const tagc_fsdp_options *o, uint64_t n_updates) {
    double t = (double)n_updates, b1 = o->beta1, b2 = o->beta2;
    double m = (1 - b1) / (1 + b1) * (1 - pow(b1, 2 * t)), v = 1 - pow(b2, t);
    return m / v;
}

static tagc_status go_on(tagc_fsdp *f, int index) {
    tagc_flat changed = f->flats[index];
    changed.gentle = 0;
    TAGC_TRY(tagc_fsdp_change_exchange(f, index, &changed));
    tagc_flat *flat = &f->flats[index];
    if (tagc_fsdp_beta1(&f->options, flat) == 0) memset(flat->moment1, 0, flat->n_owned * sizeof(float));
    return TAGC_OK;
}

tagc_status tagc_fsdp_begin_gentle(tagc_fsdp *f) {
    if (f->n_gentle == 0 || f->n_updates == 0 || f->n_updates % LOOK_EVERY != 0) return TAGC_OK;
    double most = MOST_COHERENCE * noise(&f->options, f->n_updates), mean_square, coherence;
    for (int i = 0; i < f->n_flats; i++) {
        const tagc_flat *flat = &f->flats[i];
        if (!flat->gentle) continue;
        TAGC_TRY(mean_of(f, squares_of(flat), &mean_square));
        TAGC_TRY(mean_of(f, coherence_of(flat, FAINT * FAINT * mean_square), &coherence));
        if (coherence > 0 && coherence < most) TAGC_TRY(go_on(f, i));
    }
    return TAGC_OK;
}

tagc_status tagc_fsdp_load_gentle(tagc_fsdp *f, int index, int gentle) {
    return f->flats[index].gentle && !gentle ? go_on(f, index) : TAGC_OK;
}
