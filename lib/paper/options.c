/* The options of sketch and packed. */
#include "paper/paper.h"

#include <stddef.h>

enum { SKETCH = 1 << TAGC_EXCHANGE_SKETCH, PACKED = 1 << TAGC_EXCHANGE_PACKED };

static const char *const index_names[] = {"or", "sum4", "sum1"};
static const char *const cells_names[] = {"fp32", "fixed"};
static const char *const unpeeled_names[] = {"packed", "residual", "estimate"};

/* clang-format off */
#define PAPER(name) #name, offsetof(tagc_paper_options, name)
static const tagc_field fields[] = {
    {PAPER(index), TAGC_FIELD_INT, 1, SKETCH | PACKED, TAGC_INDEX_OR, TAGC_INDEX_SUM1, TAGC_INDEX_OR,
     index_names},
    {PAPER(fill_union), TAGC_FIELD_INT, 1, SKETCH | PACKED, -1, 1, -1, NULL},
    {PAPER(ratio), TAGC_FIELD_DOUBLE, 1, SKETCH, 0, 1000, 0, NULL},
    {PAPER(cells), TAGC_FIELD_INT, 1, SKETCH, TAGC_CELLS_FP32, TAGC_CELLS_FIXED, TAGC_CELLS_FP32, cells_names},
    {PAPER(unpeeled), TAGC_FIELD_INT, 1, SKETCH, TAGC_UNPEELED_PACKED, TAGC_UNPEELED_ESTIMATE, TAGC_UNPEELED_PACKED,
     unpeeled_names},
    {PAPER(seed), TAGC_FIELD_U64, 1, SKETCH, 0, TAGC_FIELD_MAX_U64, 0, NULL},
};
/* clang-format on */
enum { N_FIELDS = sizeof fields / sizeof fields[0] };
_Static_assert((int)N_FIELDS <= (int)TAGC_OWN_MAX_FIELDS, "raise TAGC_OWN_MAX_FIELDS");
_Static_assert(sizeof(tagc_paper_options) <= TAGC_OWN_MAX_BYTES, "raise TAGC_OWN_MAX_BYTES");

static const tagc_paper_options defaults = {.fill_union = -1};
static const tagc_sized type = {"tagc_paper_options", sizeof(tagc_paper_options),
                                offsetof(tagc_paper_options, seed) +
                                    sizeof(uint64_t), /* the last field of version 0.1 */
                                &defaults};

void tagc_paper_options_init_sized(tagc_paper_options *options, size_t struct_bytes) {
    tagc_sized_init(&type, options, struct_bytes);
}

static tagc_status check(const void *own, int world_size) {
    const tagc_paper_options *paper = own;
    if (paper->ratio > 0 && paper->ratio < 1)
        return tagc_fail(TAGC_ERR_ARGUMENT, "ratio is %.10g, must be 0 (from the union) or in [1, 1000]",
                         paper->ratio);
    if (paper->index == TAGC_INDEX_SUM4 && world_size > 15)
        return tagc_fail(TAGC_ERR_UNSUPPORTED,
                         "index is sum4, which counts to 15 ranks in 4 bits, but the world size is %d",
                         world_size);
    if (paper->fill_union == 1 && paper->index != TAGC_INDEX_OR)
        return tagc_fail(TAGC_ERR_UNSUPPORTED, "fill_union is 1, which needs index or: index is %s",
                         index_names[paper->index]);
    return TAGC_OK;
}

static void resolve(const tagc_reducer_options *options, void *own) {
    tagc_paper_options *paper = own;
    if (paper->fill_union == -1)
        paper->fill_union = options->exchange == TAGC_EXCHANGE_PACKED && paper->index == TAGC_INDEX_OR;
}

const tagc_own_options tagc_paper_own_options = {
    .type = &type, .fields = fields, .n_fields = N_FIELDS, .check = check, .resolve = resolve};
