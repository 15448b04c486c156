/* Exchanges of a device's arrays between two ranks, as lib/gpu/queue.c and job.c put them into streams, and everything that may hold a
 * lock or wait meanwhile. README.md says what is modelled. All interleavings are searched: a state from which nothing goes on is a hang.
 *
 * Variables of the environment choose the protocol and the machine, so that one program checks all of them:
 *   OLD=1         host functions hand over and sleep, as before flags
 *   PYTHON=1      the exchange needs the interpreter's lock
 *   THREAD=1      the thread that exchanges launches kernels and waits for them
 *   ALLOCATOR=1   after each hook's work the driver may wait for the device (cudaFree, cudaHostAlloc, a first launch), with its lock and
 *                 the interpreter's
 *   QUEUES=1..3   hardware queues, which the three streams share
 *   EXCHANGES=1..3, BUFFERS=1..2
 *   DEPTH=1..20   places of a hardware queue
 *   WAITS=0       the caller's stream does not wait for results, and each exchange has an array of its own, as in DDP
 *   DAMAGE=1      the exchange of a rank may fail
 *   KERNELS=1     units with kernels: the device encodes, adds and settles, with a second pair of flags and a stream of its own
 *   BLOCKS=1..2   a launch returns when it has run, as under CUDA_LAUNCH_BLOCKING=1 (kernels, and the caller's own work); 2: so does a copy
 *   STEPS=1       what tagc does there: no call is made behind a flag, and the hook waits for the exchange between the copies
 *   PROBE=1       compress() finds out before the first exchange whether calls wait, as lib/gpu/probe.c does; then STEPS of that rank alone
 *   REFUSES=1     a hook may fail before it has put anything into streams: the exchange of that rank only tells the other one
 *   BUG=1..10     a planted mistake, see MISTAKES below */

#define RANKS 2
#define N 3       /* exchanges, at most */
#define BUFFERS 2 /* of pinned memory, at most */
#define ROOM 28   /* for all that a queue may ever hold */
#define QUEUES 3
#define NAN 15

/* MISTAKES */
#define NO_WAIT_FOR_BUFFER 1 /* buffers are used again at once */
#define NO_WAIT_FOR_COPY 2   /* stream `back` does not wait for the copy to the host */
#define BACK_FIRST 3         /* the wait for the result is enqueued before the copy to the host, and does not wait for that */
#define FLAG_FIRST 4         /* flag `in` is written before the copy */
#define LEAVES_EARLY 5       /* a rank whose exchange fails sends nothing */
#define NO_WAIT_FOR_BODIES 6 /* with kernels: stream `add` does not wait for the flag of bodies */
#define AGREES_EARLY 7       /* with kernels: ranks agree before the sums are there */
#define ADD_FIRST 8          /* with kernels: sums are enqueued before the fragments are encoded, and do not wait for that */
#define WAITS_FOR_SUMS 9     /* with kernels: an exchange that was refused waits for sums, of which no stream has anything */
#define NOBODY_LETS_GO 10    /* the probe has no thread that sets its flag */

/* Streams */
#define CALLER 0
#define OUT 1
#define BACK 2
#define ADD 3

/* Work in a stream. A wait for an event is one piece with the work behind it, and a record with the work before it. */
mtype = { write_gradient, /* record came */
          copy_out,       /* wait for came, and for back of the buffer's last exchange */
          hand_over,      /* record copied */
          wait_result,    /* wait for copied */
          copy_back,      /* record back */
          read_result,    /* wait for back */
          wait_bodies,    /* wait for copied */
          add_up,         /* record added */
          hand_sums,
          kernel_of_thread,
          wait_probe, probe_kernel, probe_copy };

bit refuses, has_kernels, is_old, in_python, thread_launches, has_allocator, caller_waits = 1, has_damage, probes;
bit in_steps[RANKS]; /* there, a rank has no kernels either */
bit probe_flag[RANKS], has_returned[RANKS], was_late[RANKS];
byte blocks;
byte n_exchanges = N, n_buffers = BUFFERS, n_queues = 1, depth = 4, bug;

chan queue[RANKS * QUEUES] = [ROOM] of { mtype, byte };
chan posted[RANKS] = [N] of { byte }; /* flags `in` that the host does not see yet */
chan posted_sums[RANKS] = [N] of { byte }; /* flags `added` that the host does not see yet */
chan network[RANKS] = [1] of { byte };

bit interpreter[RANKS], driver[RANKS], host_function[RANKS]; /* locks */
byte came[RANKS], copied[RANKS], back[RANKS];                /* events: the last exchange that recorded it */
byte enqueued[RANKS];                                /* the last exchange of which everything is; only then is it begun */
byte added[RANKS];                                   /* event */
byte flag_in[RANKS], flag_out[RANKS], flag_add[RANKS], flag_added[RANKS];
byte bodies[RANKS * BUFFERS], sums[RANKS * BUFFERS]; /* in rooms */
byte source[RANKS * (N + 1)];                           /* the caller's arrays: which gradient they have */
byte target[RANKS];                                     /* the result that is in the device's memory */
byte buffer_in[RANKS * BUFFERS], buffer_out[RANKS * BUFFERS];
byte n_ran[RANKS]; /* kernels of the thread */
bit failed[RANKS * (N + 1)];
bit refused[RANKS * (N + 1)]; /* nothing of it is in streams */
byte last_put[RANKS * BUFFERS], before[RANKS * (N + 1)]; /* the exchange in streams that had the buffer before */

#define LOCK(which) atomic { !which -> which = 1 }
#define UNLOCK(which) which = 0
#define BUFFER(r, k) ((r) * BUFFERS + (k) % n_buffers)
#define ARRAY(r, k) ((r) * (N + 1) + (caller_waits -> 0 : (k)))
#define HAS_KERNELS(r) (has_kernels && !in_steps[r])
#define QUEUE(r, stream) ((r) * QUEUES + (stream) % n_queues)

/* A call that finds its queue full waits inside the driver, with the driver's lock. */
#define ENQUEUE(r, stream, op, k) \
    atomic { !driver[r] -> driver[r] = 1; len(queue[QUEUE(r, stream)]) < depth; queue[QUEUE(r, stream)] ! op, k; driver[r] = 0 }

/* ---- the device: one process per hardware queue. What cannot go on holds up what is behind it. ---- */

proctype device(byte r; byte q) {
    mtype op;
    byte k;
end:
    do
    :: atomic { queue[q] ? <op, k> ->
        if
        :: op == write_gradient -> source[ARRAY(r, k)] = k; came[r] = k
        :: op == copy_out ->
            came[r] >= k && (bug == NO_WAIT_FOR_BUFFER || back[r] >= before[r * (N + 1) + k]);
            buffer_in[BUFFER(r, k)] = source[ARRAY(r, k)]
        :: op == hand_over ->
            if
            :: is_old -> !host_function[r]; flag_in[r] = k
            :: else -> posted[r] ! k
            fi;
            copied[r] = k
        :: op == wait_bodies ->
            (bug == ADD_FIRST || copied[r] >= k) && (bug == NO_WAIT_FOR_BODIES || flag_add[r] >= k)
        :: op == add_up -> sums[BUFFER(r, k)] = bodies[BUFFER(r, k)]; added[r] = k
        :: op == hand_sums -> posted_sums[r] ! k
        :: op == wait_result ->
            bug == NO_WAIT_FOR_COPY || bug == BACK_FIRST || (HAS_KERNELS(r) -> added[r] : copied[r]) >= k;
            if
            :: is_old -> !host_function[r]; host_function[r] = 1; flag_out[r] >= k; host_function[r] = 0
            :: else -> flag_out[r] >= k
            fi
        :: op == copy_back -> target[r] = buffer_out[BUFFER(r, k)]; back[r] = k
        :: op == read_result ->
            back[r] >= k;
            assert(target[r] == (failed[r * (N + 1) + k] -> NAN : k))
        :: op == kernel_of_thread -> n_ran[r] = k
        :: op == wait_probe -> probe_flag[r]
        :: op == probe_kernel || op == probe_copy
        fi;
        queue[q] ? op, k; op = 0; k = 0 }
    od
}

/* Writes of flags become visible later, in order. */
proctype bus(byte r) {
    byte k;
end:
    do
    :: atomic { posted[r] ? k -> flag_in[r] = k; k = 0 }
    :: atomic { posted_sums[r] ? k -> flag_added[r] = k; k = 0 }
    od
}

#define IS_IDLE(r) (empty(queue[(r) * QUEUES]) && empty(queue[(r) * QUEUES + 1]) && empty(queue[(r) * QUEUES + 2]) && empty(posted[r]) && \
                    empty(posted_sums[r]))

/* ---- the thread of the backward pass ---- */

/* What may be launched waits inside the driver until it has run: the queue has nothing left of it. */
#define LAUNCH(r, stream, op, k, at_least) \
    ENQUEUE(r, stream, op, k); \
    if \
    :: blocks >= at_least -> atomic { !driver[r] -> driver[r] = 1 }; atomic { !(queue[QUEUE(r, stream)] ?? [op, eval(k)]) -> driver[r] = 0 } \
    :: else \
    fi

/* Behind a flag of its own, calls are made as an exchange makes them. Another thread sets the flag, when they have returned or when it has waited
 * long enough: at any time. Who did not return in time is taken for one that waits. */
inline probe(r) {
    ENQUEUE(r, OUT, wait_probe, 0);
    if
    :: has_kernels -> LAUNCH(r, OUT, probe_kernel, 0, 1)
    :: else
    fi;
    LAUNCH(r, OUT, probe_copy, 0, 2);
    has_returned[r] = 1;
    atomic { probe_flag[r] && !(queue[QUEUE(r, OUT)] ?? [probe_copy, 0]) -> in_steps[r] = was_late[r] };
    assert(in_steps[r] || blocks < (has_kernels -> 1 : 2))
}

proctype let_go(byte r) {
    atomic { bug != NOBODY_LETS_GO -> was_late[r] = !has_returned[r]; probe_flag[r] = 1 }
}

inline to_host(r, k) {
    if
    :: bug != FLAG_FIRST -> LAUNCH(r, OUT, copy_out, k, 2); ENQUEUE(r, OUT, hand_over, k)
    :: else -> ENQUEUE(r, OUT, hand_over, k); ENQUEUE(r, OUT, copy_out, k)
    fi
}

inline to_sums(r, k) {
    if
    :: HAS_KERNELS(r) -> ENQUEUE(r, ADD, wait_bodies, k); LAUNCH(r, ADD, add_up, k, 1); ENQUEUE(r, ADD, hand_sums, k)
    :: else
    fi
}

inline to_device(r, k) {
    if
    :: in_steps[r] -> enqueued[r] = k; flag_out[r] >= k
    :: else -> ENQUEUE(r, BACK, wait_result, k)
    fi;
    LAUNCH(r, BACK, copy_back, k, 2)
}

inline put(r, k) {
    before[r * (N + 1) + k] = last_put[BUFFER(r, k)];
    last_put[BUFFER(r, k)] = k;
    LAUNCH(r, CALLER, write_gradient, k, 1);
    if
    :: bug != BACK_FIRST && bug != ADD_FIRST -> to_host(r, k); to_sums(r, k); to_device(r, k)
    :: bug == ADD_FIRST -> to_sums(r, k); to_host(r, k); to_device(r, k)
    :: else -> to_device(r, k); to_host(r, k)
    fi;
    if
    :: caller_waits -> ENQUEUE(r, CALLER, read_result, k)
    :: else -> ENQUEUE(r, BACK, read_result, k)
    fi
}

inline hook(r, k) {
    if
    :: refuses -> refused[r * (N + 1) + k] = 1
    :: put(r, k)
    fi;
    enqueued[r] = k
}

proctype backward(byte r; byte n) {
    byte k = 1;
    if
    :: probes -> probe(r)
    :: else
    fi;
    do
    :: k <= n ->
        /* Calls only add work, so what others do between two of them they may as well do after both; unless a call waits. */
        atomic { !interpreter[r] -> interpreter[r] = 1; hook(r, k) };
        if
        :: has_allocator -> LOCK(driver[r]); atomic { IS_IDLE(r) -> driver[r] = 0; interpreter[r] = 0; k++ }
        :: atomic { true -> interpreter[r] = 0; k++ }
        fi
    :: else -> break
    od;
    flag_out[r] == n /* the end of the backward pass waits for all exchanges, without the interpreter's lock */
}

/* ---- the thread that exchanges: gloo waits for messages without the interpreter's lock ---- */

#define LOCK_INTERPRETER(r) \
    if :: in_python -> !interpreter[r]; interpreter[r] = 1 :: else fi
#define UNLOCK_INTERPRETER(r) \
    if :: in_python -> interpreter[r] = 0 :: else fi

proctype exchange(byte r; byte n) {
    byte k = 1, mine, theirs;
    do
    :: k <= n ->
        atomic {
            enqueued[r] >= k && (refused[r * (N + 1) + k] || flag_in[r] >= k);
            LOCK_INTERPRETER(r);
            if
            :: thread_launches -> ENQUEUE(r, CALLER, kernel_of_thread, k); n_ran[r] >= k
            :: else
            fi;
            if
            :: refused[r * (N + 1) + k] -> mine = NAN
            :: else ->
                assert(buffer_in[BUFFER(r, k)] == k);
                if
                :: has_damage -> mine = NAN
                :: mine = k
                fi
            fi;
            if
            :: mine == NAN && bug == LEAVES_EARLY
            :: else -> network[1 - r] ! mine
            fi;
            UNLOCK_INTERPRETER(r)
        };
        atomic {
            if
            :: mine == NAN && bug == LEAVES_EARLY
            :: else -> network[r] ? theirs
            fi;
            LOCK_INTERPRETER(r);
            assert(theirs == k || theirs == NAN || (bug == LEAVES_EARLY && mine == NAN));
            if
            :: has_kernels -> /* what is added of other ranks; then they agree */
                if
                :: !refused[r * (N + 1) + k] && in_steps[r] /* the processor adds them up */
                :: !refused[r * (N + 1) + k] && !in_steps[r] ->
                    bodies[BUFFER(r, k)] = theirs;
                    flag_add[r] = k;
                    bug == AGREES_EARLY || flag_added[r] >= k;
                    assert(sums[BUFFER(r, k)] == theirs)
                :: else -> bug != WAITS_FOR_SUMS || flag_added[r] >= k
                fi;
                network[1 - r] ! (mine == NAN || theirs == NAN -> NAN : k);
                network[r] ? theirs
            :: else
            fi;
            failed[r * (N + 1) + k] = mine == NAN || theirs == NAN;
            if
            :: !refused[r * (N + 1) + k] ->
                assert(buffer_in[BUFFER(r, k)] == k); /* it was read until now */
                buffer_out[BUFFER(r, k)] = (failed[r * (N + 1) + k] -> NAN : k)
            :: else /* the buffer may be another exchange's */
            fi;
            UNLOCK_INTERPRETER(r);
            mine = 0; theirs = 0;
            flag_out[r] = k;
            k++
        }
    :: else -> break
    od
}

c_decl { \#include <stdlib.h>
static int asked_for(const char *name, int otherwise) {
    const char *text = getenv(name);
    return text ? atoi(text) : otherwise;
} }

init {
    byte r = 0, q;
    c_code {
        now.has_kernels = asked_for("KERNELS", 0);
        now.refuses = asked_for("REFUSES", 0);
        now.is_old = asked_for("OLD", 0);
        now.in_python = asked_for("PYTHON", 0);
        now.thread_launches = asked_for("THREAD", 0);
        now.has_allocator = asked_for("ALLOCATOR", 0);
        now.caller_waits = asked_for("WAITS", 1);
        now.has_damage = asked_for("DAMAGE", 0);
        now.n_exchanges = asked_for("EXCHANGES", 3);
        now.n_buffers = asked_for("BUFFERS", 2);
        now.n_queues = asked_for("QUEUES", 1);
        now.depth = asked_for("DEPTH", 4);
        now.blocks = asked_for("BLOCKS", 0);
        now.in_steps[0] = now.in_steps[1] = asked_for("STEPS", 0);
        now.probes = asked_for("PROBE", 0);
        now.bug = asked_for("BUG", 0);
    };
    atomic {
        do
        :: r < RANKS ->
            q = 0;
            do
            :: q < n_queues -> run device(r, r * QUEUES + q); q++
            :: else -> break
            od;
            run bus(r);
            if
            :: probes -> run let_go(r)
            :: else
            fi;
            run backward(r, n_exchanges);
            run exchange(r, n_exchanges);
            r++
        :: else -> r = 0; q = 0; break
        od
    }
}
