/* Options as tables: one row per field has its range and default, and whether all ranks must agree on it. */
#ifndef TAGC_EXCHANGE_OPTIONS_H
#define TAGC_EXCHANGE_OPTIONS_H

#include "core/status.h"
#include "tagc/all_to_all.h"
#include "tagc/tagc.h"
#include "transport/identity.h"

/* The formats of a gather by the words of --gather. */
typedef enum tagc_gather_kind {
    TAGC_GATHER_FP32 = 0,
    TAGC_GATHER_BF16 = 1,
    TAGC_GATHER_LOSSLESS = 2,
    TAGC_GATHER_INT8 = 3,
    TAGC_GATHER_DELTA8 = 4,
    TAGC_GATHER_DELTA4 = 5,
    TAGC_GATHER_DELTA2 = 6,
    TAGC_N_GATHER_KINDS = 7
} tagc_gather_kind;

typedef struct tagc_gather_choice {
    const char *name;
    int format, delta, lossless; /* as in tagc_gatherer_options */
} tagc_gather_choice;
extern const tagc_gather_choice tagc_gather_choices[TAGC_N_GATHER_KINDS];

void tagc_gatherer_options_choose(tagc_gatherer_options *options, int kind);
/* What options ask for, which were checked. */
int tagc_gatherer_options_kind(const tagc_gatherer_options *options);

extern const char *const tagc_format_names[TAGC_FORMAT_INT2 + 1];
extern const char *const tagc_exchange_names[TAGC_EXCHANGE_DIRECT + 1];

/* Values of the output, of checked options. */
static inline uint64_t tagc_output_elems(const tagc_reducer_options *options, int world_size) {
    return options->output == TAGC_OUTPUT_UNIT ? options->n_elems : options->n_elems / (uint64_t)world_size;
}

/* 1: direct that keeps no residual, and rounds at random. */
static inline int tagc_is_without_residual(const tagc_reducer_options *options) {
    return options->exchange == TAGC_EXCHANGE_DIRECT && options->residual == TAGC_RESIDUAL_NONE;
}
/* TAGC_ERR_UNSUPPORTED if the residual is none, and options whose defaults are resolved need one. */
tagc_status tagc_reducer_options_check_once(const tagc_reducer_options *full);

/* Of options whose sparsity and format are resolved: how owners send sums back. */
int tagc_results_are_sent(const tagc_reducer_options *options);
int tagc_result_format(const tagc_reducer_options *options);
double tagc_result_sparsity(const tagc_reducer_options *options);

/* 1: direct that sends every value as it is, fp32 or bf16, and sums as well. Options may have defaults. */
int tagc_reducer_options_are_whole(const tagc_reducer_options *options);
/* Makes them so. */
void tagc_reducer_options_send_whole(tagc_reducer_options *options, int format);

/* Resolves defaults that depend on other fields (sparsity, format, block). */
void tagc_reducer_options_resolve(tagc_reducer_options *options);
/* Resets fields that do not apply to options->exchange. For templates that several exchanges are made from. */
void tagc_reducer_options_prune(tagc_reducer_options *options);

/* Local checks of everything that one rank can see. *out: the options with defaults resolved (sparsity, format, block); out->paper is NULL. own (TAGC_OWN_MAX_BYTES): those that the exchange has beside them. */
tagc_status tagc_reducer_options_check(const tagc_reducer_options *options, int world_size,
                                       tagc_reducer_options *out, void *own);
/* TAGC_ERR_ARGUMENT if checked options differ in what a reducer cannot change. */
tagc_status tagc_reducer_options_check_change(const tagc_reducer_options *now,
                                              const tagc_reducer_options *wanted);
tagc_status tagc_gatherer_options_check(const tagc_gatherer_options *options, int world_size,
                                        tagc_gatherer_options *out);
tagc_status tagc_all_to_all_options_check(const tagc_all_to_all_options *options,
                                          tagc_all_to_all_options *out);

/* Collective. Each rank passes the status of its own preparations, with its text in tagc_last_error(). All return the same:
 * the status of the lowest rank that failed, "rank 2: <its text>", or TAGC_ERR_MISMATCH if options differ. After TAGC_OK
 * *identity is open (transport/identity.h); options and identity may be NULL where the preparations failed. *may_be_whole: 1 where it is on
 * all ranks, else it becomes 0; may be NULL as well. */
tagc_status tagc_reducer_options_agree(tagc_comm *comm, tagc_status local,
                                       const tagc_reducer_options *options, const void *own,
                                       tagc_identity *identity, int *may_be_whole);
tagc_status tagc_gatherer_options_agree(tagc_comm *comm, tagc_status local,
                                        const tagc_gatherer_options *options, tagc_identity *identity);
tagc_status tagc_all_to_all_options_agree(tagc_comm *comm, tagc_status local,
                                          const tagc_all_to_all_options *options, tagc_identity *identity);

#endif
