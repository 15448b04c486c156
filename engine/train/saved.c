/* The command's part of a checkpoint, as JSON. */
#include "train/saved.h"

#include "blas/blas.h"
#include "core/cpu.h"
#include "core/status.h"
#include "fsdp/checkpoint.h"
#include <inttypes.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>

/* ---- numbers ---- */

/* A number of a struct, and its member in JSON. */
typedef struct field {
    enum { INT, COUNT, REAL } kind; /* int and uint64_t from 0 to max, double from 0 on */
    const char *name;
    size_t offset;
    json_int_t max;
} field;

#define MOST ((json_int_t)1 << 62)
#define AT(field_) #field_, offsetof(tagc_gpt2_config, field_), 1 << 30
static const field model_fields[] = {{INT, AT(n_layer)},    {INT, AT(n_head)},     {INT, AT(n_embd)},
                                     {INT, AT(block_size)}, {INT, AT(vocab_size)}, {INT, AT(tied)}};
#undef AT
#define AT(field_) #field_, offsetof(tagc_saved, field_)
static const field saved_fields[] = {{INT, AT(world_size), 1 << 20},
                                     {COUNT, AT(position), MOST},
                                     {COUNT, AT(n_tokens), MOST},
                                     {COUNT, AT(fork_step), MOST},
                                     {COUNT, AT(data_n_tokens), MOST}};
#undef AT
#define LENGTH(fields) ((int)(sizeof fields / sizeof fields[0]))

/* JSON has no number for NaN or Inf: they are left out. */
static void write_fields(json_t *object, const void *from, const field *fields, int n) {
    for (int i = 0; i < n; i++) {
        const void *value = (const char *)from + fields[i].offset;
        json_object_set_new(object, fields[i].name,
                            fields[i].kind == REAL  ? json_real(*(const double *)value)
                            : fields[i].kind == INT ? json_integer(*(const int *)value)
                                                    : json_integer((json_int_t) * (const uint64_t *)value));
    }
}

static tagc_status read_fields(const json_t *object, void *to, const field *fields, int n) {
    for (int i = 0; i < n; i++) {
        const json_t *value = json_object_get(object, fields[i].name);
        void *out = (char *)to + fields[i].offset;
        double number = json_number_value(value);
        int is_count = json_is_integer(value) && number <= (double)fields[i].max;
        if (fields[i].kind == REAL && !(json_is_number(value) && number >= 0))
            return tagc_fail(TAGC_ERR_CORRUPT, "the checkpoint's \"%s\" is missing or no number from 0 on",
                             fields[i].name);
        if (fields[i].kind != REAL && !(is_count && number >= 0))
            return tagc_fail(TAGC_ERR_CORRUPT,
                             "the checkpoint's \"%s\" is missing or no number from 0 to %lld", fields[i].name,
                             (long long)fields[i].max);
        if (fields[i].kind == REAL)
            *(double *)out = number;
        else if (fields[i].kind == INT)
            *(int *)out = (int)json_integer_value(value);
        else
            *(uint64_t *)out = (uint64_t)json_integer_value(value);
    }
    return TAGC_OK;
}

json_t *tagc_saved_model(const tagc_gpt2_config *config) {
    json_t *object = json_object();
    write_fields(object, config, model_fields, LENGTH(model_fields));
    return object;
}

/* ---- what computed ---- */

tagc_status tagc_saved_processors(tagc_comm *comm, char *text, size_t n_bytes) {
    enum { N_LEVELS = TAGC_CPU_AVX512 + 1 };
    int world_size = tagc_comm_world_size(comm), own = (int)tagc_cpu_best(), n_at[N_LEVELS] = {0};
    int *all = calloc((size_t)world_size, sizeof *all);
    tagc_status status =
        all ? TAGC_OK : tagc_fail(TAGC_ERR_MEMORY, "no memory for the processors of %d ranks", world_size);
    if (!all) tagc_comm_abort(comm, tagc_last_error());
    if (all) status = tagc_comm_all_gather(comm, &own, sizeof own, all, (size_t)world_size * sizeof *all);
    for (int rank = 0; status == TAGC_OK && rank < world_size; rank++)
        if (all[rank] >= 0 && all[rank] < N_LEVELS) n_at[all[rank]]++;
    free(all);
    TAGC_TRY(status);
    size_t n = 0;
    for (int level = N_LEVELS - 1; level >= 0 && n < n_bytes; level--) {
        char count[16] = "";
        if (n_at[level] == 0) continue;
        if (n_at[level] < world_size) snprintf(count, sizeof count, "%d ", n_at[level]);
        n += (size_t)snprintf(text + n, n_bytes - n, "%s%s%s", n > 0 ? ", " : "", count,
                              tagc_cpu_name((tagc_cpu)level));
    }
    tagc_blas_about blas;
    tagc_blas_describe(&blas);
    if (n < n_bytes) snprintf(text + n, n_bytes - n, "; %s %s", blas.name, blas.kernel);
    return TAGC_OK;
}

/* ---- all of it ---- */

char *tagc_saved_write(const tagc_saved *saved, json_t *options) {
    char hash[17];
    json_t *root = json_object();
    json_object_set_new(root, "tagc", json_string(tagc_version()));
    json_object_set_new(root, "model", tagc_saved_model(&saved->model));
    json_object_set(root, "options", options);
    write_fields(root, saved, saved_fields, LENGTH(saved_fields));
    json_object_set_new(root, "best_val_loss",
                        isfinite(saved->best_val_loss) ? json_real(saved->best_val_loss) : json_null());
    json_object_set_new(root, "tokenizer", json_string(saved->tokenizer));
    json_object_set_new(root, "cpu", json_string(saved->cpu));
    snprintf(hash, sizeof hash, "%016" PRIx64, saved->data_hash);
    json_object_set_new(root, "data_hash", json_string(hash));
    char *text = json_dumps(root, JSON_COMPACT | JSON_REAL_PRECISION(17));
    json_decref(root);
    return text;
}

static tagc_status read_root(const json_t *root, tagc_saved *out) {
    const json_t *best = json_object_get(root, "best_val_loss");
    TAGC_TRY(read_fields(json_object_get(root, "model"), &out->model, model_fields, LENGTH(model_fields)));
    TAGC_TRY(tagc_gpt2_config_check(&out->model));
    TAGC_TRY(read_fields(root, out, saved_fields, LENGTH(saved_fields)));
    out->best_val_loss = json_is_real(best) ? json_real_value(best) : (double)INFINITY;
    const char *tokenizer = json_string_value(json_object_get(root, "tokenizer"));
    if (!tokenizer)
        return tagc_fail(TAGC_ERR_CORRUPT, "the checkpoint's \"tokenizer\" is missing or no text");
    if (strlen(tokenizer) >= sizeof out->tokenizer)
        return tagc_fail(TAGC_ERR_CORRUPT, "the checkpoint's \"tokenizer\" is longer than %zu bytes",
                         sizeof out->tokenizer - 1);
    snprintf(out->tokenizer, sizeof out->tokenizer, "%s", tokenizer);
    const char *cpu = json_string_value(json_object_get(root, "cpu"));
    snprintf(out->cpu, sizeof out->cpu, "%s", cpu ? cpu : "");
    const char *hash = json_string_value(json_object_get(root, "data_hash"));
    if (!hash) return tagc_fail(TAGC_ERR_CORRUPT, "the checkpoint's \"data_hash\" is missing or no text");
    out->data_hash = strtoull(hash, NULL, 16);
    json_t *options = json_object_get(root, "options"), *option;
    const char *name;
    if (!json_is_object(options))
        return tagc_fail(TAGC_ERR_CORRUPT, "the checkpoint's \"options\" are missing");
    json_object_foreach(options, name, option) {
        if (!json_is_string(option))
            return tagc_fail(TAGC_ERR_CORRUPT, "the checkpoint's option \"%.40s\" is no text", name);
    }
    out->options = json_incref(options);
    return TAGC_OK;
}

tagc_status tagc_saved_read(const char *text, tagc_saved *out) {
    *out = (tagc_saved){0};
    json_error_t error;
    json_t *root = json_loads(text, 0, &error);
    if (!root) return tagc_fail(TAGC_ERR_CORRUPT, "the checkpoint's options are no JSON: %s", error.text);
    tagc_status status = read_root(root, out);
    json_decref(root);
    return status;
}

tagc_status tagc_saved_open(tagc_comm *comm, const char *from, char path[TAGC_PATH_BYTES], tagc_saved *out) {
    uint64_t step;
    int world_size;
    char *text = NULL;
    *out = (tagc_saved){0};
    TAGC_TRY(tagc_checkpoint_find(comm, from, path, TAGC_PATH_BYTES));
    TAGC_TRY(tagc_checkpoint_info(path, &step, &world_size, &text));
    tagc_status status = tagc_saved_read(text, out);
    free(text);
    out->step = step;
    return status == TAGC_OK ? TAGC_OK : tagc_fail_in(status, "%s", path);
}

void tagc_saved_destroy(tagc_saved *saved) {
    json_decref(saved->options);
    saved->options = NULL;
}
