/* The clock against times worked out by hand. */

#include <math.h>

#include "../test.h"
#include "plan/clock.h"

static const tagc_sim_machine plain = {.remote_bytes_per_s = 100, .local_bytes_per_s = INFINITY};

static void assert_time(double seen, double expected) {
    if (fabs(seen - expected) > 1e-9 * fmax(1, expected))
        fail_msg("%.12g s instead of %.12g", seen, expected);
}

TEST(work_takes_its_time) {
    tagc_clock clock;
    tagc_clock_init(&clock, &plain);
    tagc_clock_work(&clock, 2.5);
    tagc_clock_work(&clock, 0);
    tagc_clock_work(&clock, 0.5);
    assert_time(clock.now_s, 3);
    assert_time(clock.comm_s, 0);
}

TEST(a_transfer_takes_bytes_and_latency) {
    tagc_sim_machine machine = plain;
    machine.latency_s = 0.5;
    tagc_sim_transfer t = {.remote_bytes = 1000};
    tagc_clock clock;
    tagc_clock_init(&clock, &machine);
    tagc_clock_post(&clock, &t);
    tagc_clock_wait(&clock, &t);
    assert_time(clock.now_s, 10.5);
    assert_time(clock.comm_s, 10.5);
    tagc_clock_wait(&clock, &t); /* is done */
    assert_time(clock.now_s, 10.5);

    tagc_sim_transfer nothing = {0}; /* no other rank: not even latency */
    tagc_clock_post(&clock, &nothing);
    tagc_clock_wait(&clock, &nothing);
    assert_time(clock.now_s, 10.5);
}

/* 1000 bytes across, 300 beside, then 500 beside: 10.5 s, 5 s with the half second of the first. Others go on meanwhile,
 * and who only waits for the last has not held it up. */
TEST(a_transfer_follows_another) {
    tagc_sim_machine machine = plain;
    machine.latency_s = 0.5;
    machine.local_bytes_per_s = 100;
    tagc_sim_transfer second = {.local_bytes = 500},
                      first = {.remote_bytes = 1000, .local_bytes = 300, .then = &second};
    tagc_clock clock;
    tagc_clock_init(&clock, &machine);
    tagc_clock_post(&clock, &first);
    tagc_clock_wait(&clock, &second);
    assert_time(clock.now_s, 15.5);
    tagc_clock_post(&clock, &first); /* and again, beside work that is longer */
    tagc_clock_work(&clock, 16);
    tagc_clock_wait(&clock, &second);
    assert_time(clock.now_s, 31.5);
    tagc_sim_transfer nothing = {.then = &second}; /* no other host: the second is all there is */
    tagc_clock_post(&clock, &nothing);
    tagc_clock_wait(&clock, &second);
    assert_time(clock.now_s, 36.5);
    second.local_bytes = 0;
    tagc_clock_post(&clock, &first);
    tagc_clock_wait(&clock, &second);
    assert_time(clock.now_s, 47);
}

/* 100 and 300 bytes: 50 a second each until 2 s, then 100 a second for the rest. */
TEST(transfers_share_the_link) {
    tagc_sim_transfer a = {.remote_bytes = 100}, b = {.remote_bytes = 300};
    tagc_clock clock;
    tagc_clock_init(&clock, &plain);
    tagc_clock_post(&clock, &a);
    tagc_clock_post(&clock, &b);
    tagc_clock_wait(&clock, &a);
    assert_time(clock.now_s, 2);
    tagc_clock_wait(&clock, &b);
    assert_time(clock.now_s, 4);

    tagc_sim_machine far = plain; /* the latency of one takes no bytes from the other */
    far.latency_s = 1;
    tagc_clock_init(&clock, &far);
    tagc_clock_post(&clock, &b);
    tagc_clock_post(&clock, &a);
    tagc_clock_wait(&clock, &a);
    assert_time(clock.now_s, 3);
    tagc_clock_wait(&clock, &b);
    assert_time(clock.now_s, 5);
}

TEST(local_and_remote_bytes_go_side_by_side) {
    tagc_sim_machine machine = plain;
    machine.local_bytes_per_s = 400;
    tagc_sim_transfer t = {.remote_bytes = 100, .local_bytes = 1200}, fast = {.local_bytes = 1200};
    tagc_clock clock;
    tagc_clock_init(&clock, &machine);
    tagc_clock_post(&clock, &t);
    tagc_clock_wait(&clock, &t);
    assert_time(clock.now_s, 3);
    tagc_clock_init(&clock, &plain);
    tagc_clock_post(&clock, &fast);
    tagc_clock_wait(&clock, &fast);
    assert_time(clock.now_s, 0);
}

/* work 1, 100 bytes, wait, work 1 */
static void make_job(tagc_sim_job *job, tagc_sim_op ops[4], tagc_sim_transfer *t) {
    ops[0] = (tagc_sim_op){.kind = TAGC_SIM_WORK, .work_s = 1};
    ops[1] = (tagc_sim_op){.kind = TAGC_SIM_POST};
    ops[2] = (tagc_sim_op){.kind = TAGC_SIM_WAIT};
    ops[3] = (tagc_sim_op){.kind = TAGC_SIM_WORK, .work_s = 1};
    *t = (tagc_sim_transfer){.remote_bytes = 100};
    *job = (tagc_sim_job){.ops = ops, .transfers = t, .n_ops = 4, .n_transfers = 1};
}

/* While one waits the other works: 0 to 1 and 2 to 3 s the first, 1 to 2 and 3 to 4 s the second. */
TEST(jobs_share_their_waits) {
    tagc_sim_op ops[2][4];
    tagc_sim_transfer t[2];
    tagc_sim_job jobs[2];
    tagc_clock clock;
    tagc_clock_init(&clock, &plain);
    for (int i = 0; i < 2; i++) {
        make_job(&jobs[i], ops[i], &t[i]);
        tagc_clock_submit(&clock, &jobs[i]);
    }
    tagc_clock_work(&clock, 2); /* beside them */
    tagc_clock_join(&clock, &jobs[0]);
    assert_time(clock.now_s, 3);
    tagc_clock_join(&clock, &jobs[1]);
    assert_time(clock.now_s, 4);
    assert_time(clock.codec_s, 4);
    assert_time(clock.comm_s, 2);
}

/* Two posts of a second each job, each of which takes 5 s to arrive. Whether the second job's first post may leave while the
 * first job waits depends on where that one posts behind its wait. Work that posts nothing may always go. */
TEST(lanes_keep_the_order_of_jobs) {
    static const struct {
        int lane, lane_of_next;
        double expected_s; /* of the second job's end */
    } cases[] = {
        {1, 0, 2 + 5 + 2 + 5},         /* both first posts share the link, then both second ones */
        {0, 1, 1 + 5 + 2 + 5 + 1 + 5}, /* lane 1 is above lane 0: the first job may still post on it */
        {0, 0, 1 + 5 + 2 + 5 + 1 + 5}};
    for (size_t i = 0; i < sizeof cases / sizeof cases[0]; i++) {
        tagc_sim_machine machine = plain;
        machine.latency_s = 5;
        tagc_sim_transfer t[2][2];
        tagc_sim_op ops[2][4];
        tagc_sim_job jobs[2];
        tagc_clock clock;
        tagc_clock_init(&clock, &machine);
        for (int k = 0; k < 2; k++) {
            t[k][0] = t[k][1] = (tagc_sim_transfer){.remote_bytes = 100};
            ops[k][0] = (tagc_sim_op){.kind = TAGC_SIM_POST, .lane = k ? cases[i].lane_of_next : 0};
            ops[k][1] = (tagc_sim_op){.kind = TAGC_SIM_WAIT};
            ops[k][2] = (tagc_sim_op){.kind = TAGC_SIM_POST, .transfer = 1, .lane = k ? 2 : cases[i].lane};
            ops[k][3] = (tagc_sim_op){.kind = TAGC_SIM_WAIT, .transfer = 1};
            jobs[k] = (tagc_sim_job){.ops = ops[k], .transfers = t[k], .n_ops = 4, .n_transfers = 2};
            tagc_clock_submit(&clock, &jobs[k]);
        }
        tagc_clock_join(&clock, &jobs[1]);
        assert_time(clock.now_s, cases[i].expected_s);
        tagc_clock_join(&clock, &jobs[0]);
        assert_time(clock.now_s, cases[i].expected_s);

        tagc_sim_op work = {.kind = TAGC_SIM_WORK, .work_s = 3};
        tagc_sim_job idle = {.ops = &work, .n_ops = 1};
        tagc_clock_init(&clock, &machine);
        tagc_clock_submit(&clock, &jobs[0]);
        tagc_clock_submit(&clock, &idle);
        tagc_clock_join(&clock, &idle);
        assert_time(clock.now_s, 3);
    }
}

TEST(an_endless_link_takes_latency_alone) {
    tagc_sim_machine machine = {
        .remote_bytes_per_s = INFINITY, .local_bytes_per_s = INFINITY, .latency_s = 0.125};
    tagc_sim_transfer a = {.remote_bytes = 1e9}, b = {.remote_bytes = 1e9};
    tagc_clock clock;
    tagc_clock_init(&clock, &machine);
    tagc_clock_post(&clock, &a);
    tagc_clock_post(&clock, &b);
    tagc_clock_wait(&clock, &a);
    tagc_clock_wait(&clock, &b);
    assert_time(clock.now_s, 0.125);
}
