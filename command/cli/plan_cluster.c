/* tagc plan for a model and a cluster by size: the same words and the same plan as `python -m tagc plan`. */
#include "cli/plan.h"

#include "cli/commands.h"
#include "cluster/cluster.h"
#include "core/status.h"
#include "disk/new_file.h"
#include <string.h>

static tagc_status write_json(const tagc_cluster *c, const tagc_cluster_plan *plan) {
    tagc_new_file file;
    TAGC_TRY(tagc_new_file_open(c->values.json, &file));
    tagc_cluster_print_json(c, plan, file.stream);
    tagc_status status = tagc_new_file_commit(&file);
    tagc_new_file_close(&file);
    return status;
}

static tagc_status make(tagc_cluster *c) {
    tagc_cluster_plan plan = {0};
    const char *path = c->values.json;
    if (path) TAGC_TRY(tagc_new_file_check(path));
    TAGC_TRY(tagc_cluster_make(c, &plan));
    if (!tagc_new_file_is_stdout(path)) tagc_cluster_print(c, &plan, stdout);
    return path ? write_json(c, &plan) : TAGC_OK;
}

static int run(tagc_parsed *parsed) {
    tagc_status status = tagc_cluster_read(parsed);
    if (status == TAGC_OK) status = make(parsed->values);
    return status == TAGC_ERR_ARGUMENT ? tagc_command_refuse(parsed->command) : tagc_command_end(status);
}

static const tagc_entry entry = {
    .command = &tagc_cluster_command, .n_value_bytes = sizeof(tagc_cluster), .run = run};

/* The name of an option, if `word` is one. */
static int option_name(const char *word, char name[64]) {
    if (strncmp(word, "--", 2) != 0) return 0;
    snprintf(name, 64, "%.*s", (int)strcspn(word + 2, "="), word + 2);
    return 1;
}

/* Its value is the rest of the word, or the next one. */
static const char *value_of(const char *word, const char *next) {
    const char *equals = strchr(word, '=');
    return equals ? equals + 1 : next ? next : "";
}

/* Whether an option that nobody has is most like one of a plan by size. */
static int is_meant(const tagc_command *own, const char *name) {
    int least = -1, found = 0;
    for (int i = 0; i < own->n_options; i++) (void)tagc_options_is_nearer(name, own->options[i].name, &least);
    for (int i = 0; i < tagc_cluster_command.n_options; i++)
        found |= tagc_options_is_nearer(name, tagc_cluster_command.options[i].name, &least);
    return found;
}

tagc_status tagc_plan_choose(const tagc_command *own, int argc, char **argv, const tagc_entry **out) {
    char name[64], by_size[64] = "", of_engine[64] = "";
    for (int i = 0; i < argc; i++) {
        if (!option_name(argv[i], name)) continue;
        int is_ours = tagc_options_find(own, name) >= 0;
        int is_theirs = tagc_options_find(&tagc_cluster_command, name) >= 0;
        const char *value = value_of(argv[i], i + 1 < argc ? argv[i + 1] : NULL);
        if (strncmp(name, "help", 4) == 0) continue;
        if (strcmp(name, "model") == 0) { /* a name that nobody knows decides nothing */
            if (tagc_cluster_is_model(value)) snprintf(by_size, sizeof by_size, "%s", name);
            continue;
        }
        if (!is_ours && !is_theirs && is_meant(own, name)) snprintf(by_size, sizeof by_size, "%s", name);
        if (is_theirs && !is_ours) snprintf(by_size, sizeof by_size, "%s", name);
        if (is_ours && !is_theirs) snprintf(of_engine, sizeof of_engine, "%s", name);
    }
    if (*by_size && *of_engine)
        return tagc_fail(
            TAGC_ERR_ARGUMENT,
            "--%s is for a plan of the engine of tagc train, and --%s for one of a model and a cluster by "
            "size; they do not go together",
            of_engine, by_size);
    if (*by_size) *out = &entry;
    return TAGC_OK;
}
