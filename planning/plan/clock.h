/* Simulated time of one rank: its caller computes, its worker runs jobs, transfers share the link. All ranks are assumed to
 * do the same at the same time, so one is simulated, and it receives as much as it sends.
 *
 *   caller    work, post, wait, submit, join: each advances the clock to where the real call would return
 *   worker    jobs, each a list of work, post and wait. An action of a job lasts from one wait to the next. When an action ends,
 *             the worker takes the oldest job that waits for nothing and whose action posts on no lane on which an older
 *             job may still post, as the worker of lib/transport does
 *   transfer  bytes at an equal share of the link among those under way, then a latency */
#ifndef TAGC_PLAN_CLOCK_H
#define TAGC_PLAN_CLOCK_H

typedef struct tagc_sim_machine { /* as one rank sees it */
    double latency_s;             /* one way */
    double remote_bytes_per_s;    /* to other hosts, each direction */
    double local_bytes_per_s;     /* to ranks of the same host; INFINITY: takes no time */
} tagc_sim_machine;

typedef struct tagc_sim_transfer {
    double remote_bytes, local_bytes; /* to send */
    struct tagc_sim_transfer *then;   /* NULL, or posted when this one is complete, without an op */
    /* private to the clock: */
    double remote_left, local_left, tail_s;
    int state;
    struct tagc_sim_transfer *next;
} tagc_sim_transfer;

typedef enum tagc_sim_op_kind { TAGC_SIM_WORK, TAGC_SIM_POST, TAGC_SIM_WAIT } tagc_sim_op_kind;

typedef struct tagc_sim_op {
    tagc_sim_op_kind kind;
    double work_s;
    int transfer; /* in the job's array */
    int lane;     /* of a post: 0 to 31; a job's last posts are on its highest lane */
    /* private to the clock: sets of lanes, from this op on */
    unsigned action_lanes, later_lanes; /* up to the next wait, and to the end */
} tagc_sim_op;

typedef struct tagc_sim_job {
    tagc_sim_op *ops;
    tagc_sim_transfer *transfers;
    int n_ops, n_transfers;
    /* the clock's */
    int at, state;
    double left_s;
    struct tagc_sim_job *next;
} tagc_sim_job;

typedef struct tagc_clock {
    tagc_sim_machine machine;
    double now_s;
    double comm_s, codec_s; /* time with a transfer under way, and time in which the worker worked */
    /* private */
    tagc_sim_transfer *active;
    tagc_sim_job *jobs, **jobs_end; /* in order of submission */
    tagc_sim_job *running;          /* in the middle of an action, or NULL */
} tagc_clock;

/* The object must not be moved in memory. */
void tagc_clock_init(tagc_clock *clock, const tagc_sim_machine *machine);
void tagc_clock_work(tagc_clock *clock, double work_s);
void tagc_clock_post(tagc_clock *clock, tagc_sim_transfer *transfer);
void tagc_clock_wait(tagc_clock *clock, const tagc_sim_transfer *transfer);
void tagc_clock_submit(tagc_clock *clock, tagc_sim_job *job);
void tagc_clock_join(tagc_clock *clock, const tagc_sim_job *job);

#endif
