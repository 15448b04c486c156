/* Life of a schedule, and what it tells: plans, betas, alarms. */
#include "core/sized.h"
#include "schedule/private.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { MOST_NAME = 1023 };

static const tagc_schedule_options defaults = {.gentle = 1,
                                               .sparsity = 0.95,
                                               .format = TAGC_FORMAT_INT2,
                                               .mild_sparsity = 0.85,
                                               .mild_format = TAGC_FORMAT_INT4,
                                               .short_beta1 = 0.5};
static const tagc_sized options_type = {"tagc_schedule_options", sizeof(tagc_schedule_options),
                                        sizeof(tagc_schedule_options), &defaults};

void tagc_schedule_options_init_sized(tagc_schedule_options *options, size_t struct_bytes) {
    tagc_sized_init(&options_type, options, struct_bytes);
}

static const tagc_schedule_constants constants = {.window = TAGC_WINDOW,
                                                  .fresh_windows = TAGC_FRESH_WINDOWS,
                                                  .largest_share = TAGC_LARGEST_SHARE,
                                                  .most_share = TAGC_MOST_SHARE,
                                                  .block_of_every = TAGC_BLOCK_OF_EVERY};
static const tagc_sized constants_type = {"tagc_schedule_constants", sizeof(tagc_schedule_constants),
                                          sizeof(tagc_schedule_constants), &constants};

void tagc_schedule_constants_init_sized(tagc_schedule_constants *to, size_t struct_bytes) {
    tagc_sized_init(&constants_type, to, struct_bytes);
}

const char *tagc_level_name(int level) {
    static const char *const names[] = {"fresh", "every", "largest", "last"};
    return level >= 0 && level <= TAGC_LEVEL_LAST ? names[level] : "?";
}

static tagc_status check_range(const char *name, double value, double most) {
    if (value >= 0 && value <= most) return TAGC_OK;
    return tagc_fail(TAGC_ERR_ARGUMENT, "%s is %g, must be in [0, %g]", name, value, most);
}

static tagc_status check_format(const char *name, tagc_format format) {
    if ((int)format >= TAGC_FORMAT_FP32 && format <= TAGC_FORMAT_INT2) return TAGC_OK;
    return tagc_fail(TAGC_ERR_ARGUMENT,
                     "%s is %d, must be fp32 (0), bf16 (1), int8 (2), int4 (3) or int2 (4)", name,
                     (int)format);
}

static tagc_status check_options(const tagc_schedule_options *o) {
    TAGC_TRY(check_range("gentle", o->gentle, 1));
    TAGC_TRY(check_range("fresh", o->fresh, 1));
    TAGC_TRY(check_range("sparsity", o->sparsity, 1));
    TAGC_TRY(check_range("mild_sparsity", o->mild_sparsity, 1));
    TAGC_TRY(check_format("format", o->format));
    TAGC_TRY(check_format("mild_format", o->mild_format));
    if (!(o->short_beta1 >= 0) || !(o->short_beta1 < 1))
        return tagc_fail(TAGC_ERR_ARGUMENT, "short_beta1 is %g, must be in [0, 1)", o->short_beta1);
    return TAGC_OK;
}

static int by_name(const void *a, const void *b) {
    return strcmp(*(char *const *)a, *(char *const *)b);
}

static tagc_status check_names(const tagc_schedule_parameter *parameters, size_t n) {
    const char **names = malloc((n + 1) * sizeof *names);
    if (!names) return tagc_fail(TAGC_ERR_MEMORY, "no memory for %zu names", n);
    for (size_t i = 0; i < n; i++) names[i] = parameters[i].name;
    qsort(names, n, sizeof *names, by_name);
    tagc_status status = TAGC_OK;
    for (size_t i = 1; i < n && status == TAGC_OK; i++)
        if (!strcmp(names[i - 1], names[i]))
            status =
                tagc_fail(TAGC_ERR_ARGUMENT, "two parameters are named \"%s\", names must differ", names[i]);
    free(names);
    return status;
}

static tagc_status check_parameters(const tagc_schedule_parameter *parameters, size_t n) {
    if (n > UINT32_MAX) return tagc_fail(TAGC_ERR_ARGUMENT, "n_parameters is %zu, must be below 2^32", n);
    if (n > 0 && !parameters)
        return tagc_fail(TAGC_ERR_ARGUMENT, "parameters is NULL, n_parameters is %zu", n);
    for (size_t i = 0; i < n; i++) {
        const tagc_schedule_parameter *p = &parameters[i];
        if (!p->name || !p->name[0] || strlen(p->name) > MOST_NAME)
            return tagc_fail(TAGC_ERR_ARGUMENT, "parameters[%zu]: name must have 1 to %d bytes", i,
                             MOST_NAME);
        if (p->n_elems == 0)
            return tagc_fail(TAGC_ERR_ARGUMENT, "parameters[%zu] (%s): n_elems is 0, must be above 0", i,
                             p->name);
        if (p->kind != TAGC_CLASS_COMPRESSED && p->kind != TAGC_CLASS_MILD)
            return tagc_fail(TAGC_ERR_ARGUMENT,
                             "parameters[%zu] (%s): kind is %d, must be compressed (0) or mild (1)", i,
                             p->name, (int)p->kind);
    }
    return check_names(parameters, n);
}

static tagc_status init_parameter(const tagc_schedule_options *o, const tagc_schedule_parameter *from,
                                  tagc_scheduled *p) {
    double sparsity = from->kind == TAGC_CLASS_MILD ? o->mild_sparsity : o->sparsity;
    int has_levels = o->gentle && sparsity > 0;
    int first = !has_levels ? TAGC_LEVEL_LAST : o->fresh ? TAGC_LEVEL_FRESH : TAGC_LEVEL_EVERY;
    *p = (tagc_scheduled){.n_elems = from->n_elems,
                          .kind = from->kind,
                          .has_levels = has_levels,
                          .now = first,
                          .next = first,
                          .fading = TAGC_NOT_FADING,
                          .mean_square = -1,
                          .share = 1,
                          .next_share = 1};
    p->name = strdup(from->name);
    return p->name ? TAGC_OK : tagc_fail(TAGC_ERR_MEMORY, "no memory for the name %s", from->name);
}

tagc_status tagc_schedule_create(const tagc_schedule_options *options,
                                 const tagc_schedule_parameter *parameters, size_t n, tagc_schedule **out) {
    *out = NULL;
    tagc_schedule_options o;
    TAGC_TRY(tagc_sized_read(&options_type, options, &o));
    TAGC_TRY(check_options(&o));
    TAGC_TRY(check_parameters(parameters, n));
    tagc_schedule *s = calloc(1, sizeof *s);
    if (s) {
        s->options = o;
        s->is_fresh = o.fresh;
        s->parameters = calloc(n + 1, sizeof *s->parameters);
        s->members = calloc(n + 1, sizeof *s->members);
    }
    tagc_status status = s && s->parameters && s->members
                             ? TAGC_OK
                             : tagc_fail(TAGC_ERR_MEMORY, "no memory for a schedule of %zu parameters", n);
    for (; status == TAGC_OK && s->n < n; s->n++)
        status = init_parameter(&o, &parameters[s->n], &s->parameters[s->n]);
    if (status == TAGC_OK)
        *out = s;
    else
        tagc_schedule_destroy(s);
    return status;
}

void tagc_schedule_destroy(tagc_schedule *s) {
    if (!s) return;
    for (size_t i = 0; i < s->n; i++) free(s->parameters[i].name);
    free(s->parameters);
    free(s->members);
    free(s);
}

tagc_status tagc_schedule_set_moment(tagc_schedule *s, size_t parameter, tagc_moment moment) {
    if (parameter >= s->n)
        return tagc_fail(TAGC_ERR_ARGUMENT, "parameter is %zu, must be below %zu", parameter, s->n);
    if (moment != TAGC_MOMENT_STAYS && moment != TAGC_MOMENT_SHORTENS && moment != TAGC_MOMENT_NONE)
        return tagc_fail(TAGC_ERR_ARGUMENT, "moment is %d, must be stays (0), shortens (1) or none (2)",
                         (int)moment);
    tagc_scheduled *p = &s->parameters[parameter];
    if (p->kind != TAGC_CLASS_COMPRESSED) {
        p->moment = moment;
        return TAGC_OK;
    }
    int was_short = p->moment == TAGC_MOMENT_NONE || p->is_settled || p->fading != TAGC_NOT_FADING;
    int is_selected = p->has_levels && p->now > TAGC_LEVEL_EVERY;
    /* What is selected already relies on a short moment. A long one that comes is made short at once, or, where nobody can
     * do that, every value travels again. */
    if (is_selected && was_short && moment == TAGC_MOMENT_STAYS) p->next = TAGC_LEVEL_EVERY;
    if (moment != TAGC_MOMENT_SHORTENS) {
        p->fading = TAGC_NOT_FADING;
        p->is_settled = 0;
    } else if (is_selected && p->moment == TAGC_MOMENT_NONE)
        p->fading = 0;
    p->moment = moment;
    return TAGC_OK;
}

/* ---- plans ---- */

/* The largest of 20, 40, 80, ... up to n, or 0: an optimizer then seldom has to take up another beta2. */
static uint64_t doubled(uint64_t n) {
    uint64_t found = n >= TAGC_WINDOW ? TAGC_WINDOW : 0;
    while (found > 0 && 2 * found <= n) found *= 2;
    return found;
}

static double moment_of(const tagc_schedule *s, const tagc_scheduled *p) {
    if (p->kind != TAGC_CLASS_COMPRESSED || p->moment != TAGC_MOMENT_SHORTENS) return 1;
    if (p->is_settled || (!s->options.gentle && s->options.sparsity > 0)) return 0;
    return p->fading == TAGC_NOT_FADING ? 1 : (double)p->fading / TAGC_FADING;
}

static uint64_t n_selected(const tagc_scheduled *p) {
    return p->has_levels && p->now > TAGC_LEVEL_EVERY ? doubled((uint64_t)TAGC_WINDOW * p->n_windows) : 0;
}

static void write_sending(const tagc_schedule_options *options, tagc_class kind, tagc_schedule_plan *plan) {
    switch (plan->level) {
    case TAGC_LEVEL_FRESH:
        plan->format = TAGC_FORMAT_INT8;
        break;
    case TAGC_LEVEL_EVERY:
        plan->format = TAGC_FORMAT_INT4;
        plan->block = TAGC_BLOCK_OF_EVERY;
        break;
    case TAGC_LEVEL_LARGEST:
        plan->format = TAGC_FORMAT_INT4;
        break;
    default:
        plan->format = kind == TAGC_CLASS_MILD ? options->mild_format : options->format;
    }
}

tagc_status tagc_schedule_get_plan(const tagc_schedule *s, const uint32_t *parameters,
                                   const uint64_t *weights, size_t n, tagc_schedule_plan *plan) {
    if (n == 0) return tagc_fail(TAGC_ERR_ARGUMENT, "n is 0, must be at least 1");
    TAGC_TRY(tagc_schedule_check(s, parameters, n));
    const tagc_scheduled *careful = &s->parameters[parameters[0]];
    double share = 0, total = 0, moment = 0;
    uint64_t selected = UINT64_MAX;
    for (size_t i = 0; i < n; i++) {
        const tagc_scheduled *p = &s->parameters[parameters[i]];
        if (p->kind != careful->kind)
            return tagc_fail(TAGC_ERR_ARGUMENT,
                             "%s and %s are of two classes, parameters of a plan must be of one",
                             careful->name, p->name);
        if (p->now < careful->now) careful = p;
        double weight = weights ? (double)weights[i] : (double)p->n_elems;
        share += p->share * weight;
        total += weight;
        moment = fmax(moment, moment_of(s, p));
        if (n_selected(p) < selected) selected = n_selected(p);
    }
    /* Two digits: a share that hardly differs needs no other reducer. */
    share = total > 0 ? rint(100 * share / total) / 100 : 1;
    *plan = (tagc_schedule_plan){.level = careful->now, .moment = moment, .n_selected = selected};
    write_sending(&s->options, careful->kind, plan);
    plan->sparsity = 1 - fmin(1, share * tagc_level_share(&s->options, careful->kind, careful->now));
    return TAGC_OK;
}

tagc_status tagc_schedule_plan_of_level(const tagc_schedule_options *options, tagc_class kind, int level,
                                        tagc_schedule_plan *plan) {
    const tagc_schedule_options *o = options ? options : &defaults;
    if (kind != TAGC_CLASS_COMPRESSED && kind != TAGC_CLASS_MILD)
        return tagc_fail(TAGC_ERR_ARGUMENT, "kind is %d, must be compressed (0) or mild (1)", (int)kind);
    if (level < TAGC_LEVEL_FRESH || level > TAGC_LEVEL_LAST)
        return tagc_fail(TAGC_ERR_ARGUMENT, "level is %d, must be 0 to %d", level, TAGC_LEVEL_LAST);
    if (kind == TAGC_CLASS_MILD && level == TAGC_LEVEL_LARGEST) level = TAGC_LEVEL_EVERY;
    double sparsity = kind == TAGC_CLASS_MILD ? o->mild_sparsity : o->sparsity;
    int has_levels = o->gentle && sparsity > 0;
    *plan = (tagc_schedule_plan){.level = has_levels ? level : TAGC_LEVEL_LAST, .moment = 1};
    write_sending(o, kind, plan);
    plan->sparsity = 1 - tagc_level_share(o, kind, plan->level);
    return TAGC_OK;
}

void tagc_schedule_betas(const tagc_schedule *s, double moment, uint64_t n, double beta1, double beta2,
                         double *own_beta1, double *own_beta2) {
    double shortest = s ? s->options.short_beta1 : defaults.short_beta1;
    if (moment < 1 && beta1 > shortest) {
        /* By equal factors in (1 + beta1) / (1 - beta1), the curvature that steps with such a moment tolerate. */
        double least = (1 + shortest) / (1 - shortest), most = (1 + beta1) / (1 - beta1);
        double tolerated = least * pow(most / least, fmax(0, moment));
        beta1 = (tolerated - 1) / (tolerated + 1);
    }
    if (n > 0) {
        /* An Adam corrects as if beta2 had been the same from the first update on: 1 - 3 / n keeps that within 5 %. */
        double longest = fmin(1 - (1 - beta2) / TAGC_SELDOM, 1 - 3.0 / (double)n);
        beta2 = fmax(beta2, longest);
    }
    *own_beta1 = beta1;
    *own_beta2 = beta2;
}

/* ---- alarms ---- */

void tagc_schedule_take_alarms(tagc_schedule *s, tagc_alarm *alarms, size_t *n) {
    *n = 0;
    for (int kind = 0; kind < TAGC_N_ALARM_KINDS; kind++) {
        if (s->alarms[kind].n_parameters > 0) alarms[(*n)++] = s->alarms[kind];
        s->alarms[kind] = (tagc_alarm){0};
    }
}

void tagc_schedule_alarm_text(const tagc_schedule *s, const tagc_alarm *a, char *text, size_t n_bytes) {
    const char *name = a->worst < s->n ? s->parameters[a->worst].name : "?";
    char who[MOST_NAME + 64];
    if (a->n_parameters > 1)
        snprintf(who, sizeof who, "%s and %zu other%s", name, a->n_parameters - 1,
                 a->n_parameters > 2 ? "s" : "");
    else
        snprintf(who, sizeof who, "%s", name);
    const char *then = "compression falls behind, so every value of them travels for a while";
    if (a->kind == TAGC_ALARM_RESIDUAL)
        snprintf(text, n_bytes,
                 "the residual of %s has grown to %.0f times the gradient (allowed are %g): %s", who,
                 a->value, TAGC_MOST_GROWTH, then);
    else if (a->kind == TAGC_ALARM_LOSS)
        snprintf(text, n_bytes,
                 "the loss has risen %.3g %% above its lowest: compression may be the cause, so every value "
                 "of %s travels "
                 "for a while",
                 100 * a->value, who);
    else
        snprintf(text, n_bytes,
                 "the gradient of %s points one way again (%.1f times what noise would, allowed are %g): %s",
                 who, a->value, TAGC_ALARM, then);
}
