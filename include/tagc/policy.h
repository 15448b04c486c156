/* Which parameters of a model stand compression, told by their names and shapes alone, so that all ranks get the same.
 *
 *   tagc_classify     says the class of a parameter, and why
 *   tagc_clean_name   leaves out of a name what torch's wrappers put into it
 *
 * Names are as torch has them: modules from the outermost inwards, with dots between. They are read from the innermost outwards, so
 * `layers.0.self_attn.o_proj.weight` is a projection, and `attn_model.layers.0.mlp.fc1.weight` is not attention. ASCII letters of both cases
 * are the same; other bytes are letters that no rule names. Names may have any length. Both functions are local, allocate nothing, and may be
 * called from several threads at once. */
#ifndef TAGC_POLICY_H
#define TAGC_POLICY_H

#include "tagc/tagc.h"

#ifdef __cplusplus
extern "C" {
#endif

/* How the gradient of a parameter is exchanged. */
typedef enum tagc_class {
    /* Most of it is not sent and becomes the residual. */
    TAGC_CLASS_COMPRESSED = 0,
    /* A milder code, for attention and positions: the strong one increases their loss. */
    TAGC_CLASS_MILD = 1,
    /* Every value is sent: norms, biases, routers, small matrices. */
    TAGC_CLASS_DENSE = 2,
    TAGC_N_CLASSES = 3
} tagc_class;

/* What to pass as min_elems. 4096 gradients of fp32 are 16 KiB: 13 us at 10 Gbit/s, less than the overhead of a message, so compressing a
 * smaller matrix saves no time. Selection also has little choice: 5 % of 4096 are 200 values, over all owners. Such small matrices are
 * mostly tables of biases or types, whose values matter more. The matrices of a model of width 32 are larger than this. */
#define TAGC_CLASS_MIN_ELEMS 4096

/* Sets *class_ to the class of the parameter `name`, which must not be empty, of the shape `shape`: (n_dims,), NULL if n_dims is 0. Matrices
 * of fewer than min_elems values are dense. *reason becomes one of a few words that say why, such as "embedding", which are never freed.
 * Parts of the name that tagc_clean_name leaves out do not count. class_ and reason may be NULL. TAGC_ERR_ARGUMENT names what is
 * not allowed, such as a shape of 2^64 values or more. */
TAGC_API tagc_status tagc_classify(const char *name, const uint64_t *shape, size_t n_dims, uint64_t min_elems,
                                   tagc_class *class_, const char **reason);

/* Writes `name` without the parts _fsdp_wrapped_module, _checkpoint_wrapped_module and _orig_mod, which torch's wrappers insert, into
 * `clean` of n_bytes bytes; a name of nothing else stays as it is. n_bytes must be above the length of `name`. */
TAGC_API tagc_status tagc_clean_name(const char *name, char *clean, size_t n_bytes);

#ifdef __cplusplus
}
#endif

#endif
