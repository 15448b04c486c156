/* What `python -m tagc plan` asks libtagc-plan.so: words of a command line in, text out. */
#ifndef TAGC_CLUSTER_ASK_H
#define TAGC_CLUSTER_ASK_H

#include "tagc/tagc.h"

typedef struct tagc_plan_answer_text {
    size_t struct_bytes;
    char *text;       /* to print: the plan, or the help */
    char *json;       /* the plan; NULL with a help */
    const char *path; /* one of the words, where the JSON goes: NULL: nowhere, "-": in place of the text */
    char why[512];    /* "" or why there is no answer */
} tagc_plan_answer_text;

/* words (n): behind "plan". TAGC_ERR_ARGUMENT if the words are at fault. Call _free after success. */
TAGC_API tagc_status tagc_plan_words(int n, char **words, tagc_plan_answer_text *out);
TAGC_API void tagc_plan_words_free(tagc_plan_answer_text *answer);

#endif
