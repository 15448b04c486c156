/* The whole command without files and exit codes. */
#include "cluster/ask.h"

#include "cluster/cluster.h"
#include "core/status.h"
#include <stdlib.h>
#include <string.h>

/* What print() prints, as text. */
static tagc_status to_text(void (*print)(const tagc_cluster *, const tagc_cluster_plan *, FILE *),
                           const tagc_cluster *c, const tagc_cluster_plan *plan, char **out) {
    size_t n_bytes;
    FILE *file = open_memstream(out, &n_bytes);
    if (!file) return tagc_fail(TAGC_ERR_MEMORY, "out of memory for a plan");
    print(c, plan, file);
    if (fclose(file) == 0) return TAGC_OK;
    free(*out);
    *out = NULL;
    return tagc_fail(TAGC_ERR_MEMORY, "out of memory for a plan");
}

static void print_help(const tagc_cluster *c, const tagc_cluster_plan *plan, FILE *out) {
    (void)c;
    (void)plan;
    tagc_options_explain(&tagc_cluster_command, out);
}

static tagc_status answer(tagc_cluster *c, const tagc_parsed *parsed, tagc_plan_answer_text *out) {
    tagc_cluster_plan plan = {0};
    if (parsed->help) return to_text(print_help, c, &plan, &out->text);
    TAGC_TRY(tagc_cluster_read(parsed));
    TAGC_TRY(tagc_cluster_make(c, &plan));
    TAGC_TRY(to_text(tagc_cluster_print, c, &plan, &out->text));
    out->path = c->values.json;
    return to_text(tagc_cluster_print_json, c, &plan, &out->json);
}

tagc_status tagc_plan_words(int n, char **words, tagc_plan_answer_text *out) {
    tagc_cluster c = {0};
    tagc_parsed parsed = {0};
    if (out->struct_bytes != sizeof *out) return TAGC_ERR_MISMATCH; /* of another version */
    *out = (tagc_plan_answer_text){.struct_bytes = sizeof *out};
    tagc_status status = tagc_options_parse(&tagc_cluster_command, n, words, &c, &parsed);
    if (status == TAGC_OK) status = answer(&c, &parsed, out);
    tagc_options_destroy(&parsed);
    if (status == TAGC_OK) return TAGC_OK;
    tagc_plan_words_free(out);
    snprintf(out->why, sizeof out->why, "%s", tagc_last_error());
    return status;
}

void tagc_plan_words_free(tagc_plan_answer_text *out) {
    free(out->text);
    free(out->json);
    out->text = out->json = NULL;
}
