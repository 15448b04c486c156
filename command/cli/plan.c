/* tagc plan: the plan of a model and a cluster by size (command/cluster), printed and written. */
#include "cli/commands.h"
#include "cluster/cluster.h"
#include "core/status.h"
#include "disk/new_file.h"

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

const tagc_entry tagc_entry_plan = {
    .command = &tagc_cluster_command, .n_value_bytes = sizeof(tagc_cluster), .run = run};
