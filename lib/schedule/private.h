/* What the files of the schedule share. */
#ifndef TAGC_SCHEDULE_PRIVATE_H
#define TAGC_SCHEDULE_PRIVATE_H

#include "core/status.h"
#include "schedule/constants.h"
#include "tagc/schedule.h"

typedef struct tagc_window {
    uint32_t n_exchanges;
    uint32_t n; /* samples */
    float sums[TAGC_SCHEDULE_SAMPLE], squares[TAGC_SCHEDULE_SAMPLE];
} tagc_window;

enum { TAGC_NOT_FADING = -1 };

typedef struct tagc_scheduled {
    char *name;
    uint64_t n_elems;
    tagc_class kind;
    tagc_moment moment;
    int now, next;  /* levels: in effect, and from the next step on */
    int has_levels; /* 0: always at LAST */
    int is_seen;    /* had a gradient over a window: what is frozen or never used holds nothing up */
    int is_noise;   /* in its last window */
    int has_grown;  /* its residual was too large at the end of its last window */
    int is_settled; /* its first moment is short for good; of a mild one: those of the compressed ones are */
    int is_full;    /* its window became full since the last step */
    int fading;     /* windows until its first moment is short, 0: it is, or TAGC_NOT_FADING */
    int is_pending; /* something was seen since the last step, and nothing decided from it */
    tagc_schedule_sums pending;
    uint64_t group;      /* ranks that decide about it: the caller's number and 1, or 0: not known */
    uint32_t n_calm;     /* windows in a row in which it could go on */
    uint32_t n_failures; /* how often it began anew */
    uint32_t n_windows;
    double mean_square; /* of its gradient, of late; negative: unknown */
    double share, next_share;
    tagc_window window;
} tagc_scheduled;

/* Sums over a window of losses, and the lowest of these windows. */
typedef struct tagc_loss_watch {
    tagc_schedule_losses own;    /* this rank's, since they were taken */
    tagc_schedule_losses pooled; /* of all ranks, since the last window */
    double least, variance;      /* of the window with the lowest mean; variance of that mean */
    int has_least, has_risen;
} tagc_loss_watch;

struct tagc_schedule {
    tagc_schedule_options options;
    int is_fresh; /* of the run, so also after loading */
    size_t n;
    tagc_scheduled *parameters;
    tagc_scheduled **members; /* (n,) work memory of a step */
    tagc_loss_watch losses;
    tagc_alarm alarms[TAGC_N_ALARM_KINDS]; /* n_parameters 0: none */
};

/* ---- windows.c ---- */
/* Returns 1 if the next tagc_schedule_add of these parameters may fill a window. */
int tagc_schedule_is_due(const tagc_schedule *schedule, const uint32_t *parameters, size_t n);
void tagc_window_scale(tagc_window *window, double factor);
/* Returns the relative rise above the lowest loss if it is too much, else 0. */
double tagc_losses_see(tagc_loss_watch *watch, const tagc_schedule_losses *losses);

/* ---- levels.c ---- */
/* The share of values that a level sends. */
double tagc_level_share(const tagc_schedule_options *options, tagc_class kind, int level);
tagc_status tagc_schedule_check(const tagc_schedule *schedule, const uint32_t *parameters, size_t n);

#endif
