/*
 * claim.pml: the claim protocol of one key, for the model checker spin.
 *
 * Tests try some interleavings; here are all of them, for CLIENTS clients
 * that each send the request up to TRIES times, with a sweep and the passing
 * of time in between, and with the end of any of them at any step.  Each
 * atomic step below is one that PostgreSQL does at once as well: under the
 * lock of a buffer or of an index page, or with one entry in the commit log.
 *
 * Run by test/model/run, which also takes a part of the protocol away at a
 * time (-DNO_FENCE and so on) and wants to see it go wrong.
 *
 * PROPERTIES
 *
 * no_second_effect	  what a key stands for is done at most once in its life
 * memory_is_effect	  what is committed under a key is what has been done:
 *					  a completed key has its effect, no effect lacks its key
 * answer_is_effect	  a duplicate is answered with the effect that stands
 * one_row			  a key has one committed row
 * index_is_free	  an update of the row never meets a rival in the index,
 *					  which would be a wait or a duplicate-key error
 * last_is_let_in	  whatever has happened, nothing but a lease is in the way
 *					  of a client that comes after all that, ...
 * last_is_answered	  ... and in the end the key is completed
 *
 * That nobody waits for ever is a check of spin's own, "invalid end state";
 * PATIENT takes away the timeouts, so that it would be seen.  A begin has no
 * step that waits, but for a speculative row to be settled.
 *
 * WHAT IS LEFT OUT, AND WHY THAT IS SOUND
 *
 * Rows.  The end of a transaction is one step that settles its rows at once:
 * dead versions go, and who has found one is told so, as t_ctid would.
 * Visibility is a function of the state of transactions, so nobody can tell
 * the difference.  A row's place in the table tells nothing either, so the
 * committed row is one variable and what each writer has not committed is
 * another.  A second change by one transaction is made in place, for to
 * others both versions are a running writer's.
 *
 * Scans.  A scan under an MVCC snapshot is one step, for it shows the moment
 * of its snapshot.  A scan under a dirty snapshot is not: it can miss a row
 * that is being moved.  So a probe is a look at one moment, or sees nothing
 * although there is a row, as often as it likes: more than can happen.
 *
 * Time.  Whoever reads a row may find its lease over or not, and the same of
 * its retention, whatever others have found: more than can happen, too.
 *
 * Other keys, tenants and routes do not meet.  A mismatch writes nothing.
 * The retry budget, the cap of attempts and "hold" only refuse what is
 * allowed here.  FOR KEY SHARE conflicts with no lock taken here but the
 * sweep's, which passes the row over.  Savepoints, REPEATABLE READ and
 * PREPARE TRANSACTION end in what is here already: an abort, an error, or a
 * transaction that takes longer.  MAX_ROUNDS turns an endless "look again"
 * into an error, which is an abort.  idem_resume takes a claim over as a
 * begin does: lock without waiting, attempt + 1.
 *
 * ONE ASSUMPTION: no worker goes on with a claim after its key has begun a
 * new life (its row was swept or reclaimed).  Attempts are counted from 1
 * again there, so the fence may take it for the new life's owner.  -DSLEEPER
 * lifts the assumption, and shows that; -DONE_COUNT, that nothing else than
 * the count is the reason.
 */

#ifndef CLIENTS
#define CLIENTS		3
#endif
#ifndef TRIES
#define TRIES		2
#endif

/* Writers: who a running transaction belongs to; 0 is nobody */
#define LAST		(CLIENTS + 1)	/* the client after all others */
#define SWEEPER		(CLIENTS + 2)

/* state */
#define FREE		0			/* no row */
#define IN_PROGRESS	1
#define COMPLETED	2
#define FAILED		3

typedef Row
{
	unsigned state : 2;
	bit speculative;
	bit released;				/* lease_until is -infinity */
	bit anew;					/* not yet committed: begins another life */
	unsigned attempt : 4;
	unsigned effect : 3;		/* step_data while in progress, then the
								 * response: which effect it tells of */
};

/* The committed row, and what a running transaction is doing to it */
#define NOTHING		0
#define LOCKS		1
#define UPDATES		2
#define DELETES		3
Row row;
unsigned xmax : 3;
unsigned change : 2;

/* What each writer has not committed: an insert, or the new version */
Row next[SWEEPER + 1];

/*
 * Has a client found the committed row (store->row), and what has become of
 * that since: what table_tuple_lock() would find out
 */
#define NOT_FOUND	0
#define SAME		1
#define UPDATED		2
#define DELETED		3
typedef Finding
{
	unsigned now : 2
};
Finding found[SWEEPER + 1];

/*
 * Attempts are counted from 1 in each life of a key.  With ONE_COUNT they are
 * not, as if a sequence gave them, which needs no assumption about sleepers.
 */
#ifdef ONE_COUNT
unsigned given : 4;
#define COUNT_FIRST(r)	given++; r.attempt = given
#define COUNT_NEXT(r)	given++; r.attempt = given
#else
#define COUNT_FIRST(r)	r.attempt = 1
#define COUNT_NEXT(r)	r.attempt = r.attempt + 1
#endif

/* The business data: the effect of this life of the key, and those to come */
unsigned effect : 3;
typedef Work
{
	unsigned effect : 3
};
Work pending[SWEEPER + 1];

unsigned arrived : 3 = 1;		/* clients that may have begun, see Client */
unsigned gone : 3;				/* clients that are done */
unsigned workers : 2;			/* who hold a claim committed in progress */

/* within one step only, so no part of the state */
hidden byte n;
hidden byte q;
hidden byte seen;
hidden byte over;				/* time is over: of the lease, the retention */
hidden byte no_second_effect;
hidden byte memory_is_effect;
hidden byte answer_is_effect;
hidden byte one_row;
hidden byte index_is_free;
hidden byte last_is_let_in;
hidden byte last_is_answered;

/* ------------------------------------------------------------------
 *		What is to be met, so that the run can tell that all of it happens
 * ------------------------------------------------------------------ */

c_decl {
\#include <stdio.h>
\#include <stdlib.h>
static unsigned char met[64];

static void
tell_met(void)
{
	for (int m = 0; m < 64; m++)
		if (met[m])
			printf("met %d\n", m);
}

static void
meet(int m)
{
	static int	registered = 0;

	if (!registered)
		atexit(tell_met);
	registered = 1;
	met[m] = 1;
}
}
#define MET(m)		c_code { meet(m); }

#define STARTED					1	/* met */
#define TOOK_OVER_LOST			2	/* met: a lease that is over */
#define TOOK_OVER_RELEASED		3	/* met */
#define TOOK_OVER_FAILED		4	/* met */
#define RECLAIMED				5	/* met */
#define REPLAYED				6	/* met */
#define SAW_ARRIVING			7	/* met */
#define SAW_LEAVING				8	/* met */
#define LEASE_LIVES				9	/* met */
#define LOCK_BUSY				10	/* met */
#define LOCK_CHANGED			11	/* met */
#define LOST_THE_INSERT			12	/* met */
#define FENCED					13	/* met: IK001, at the first look */
#define FENCED_AFTER_WAIT		14	/* met: IK001, at the second */
#define NO_CLAIM				15	/* asleep: IK002 */
#define WAS_FINISHED			16	/* met: IK003, at the first look */
#define WAS_FINISHED_AFTER_WAIT	17	/* asleep: IK003, at the second */
#define GONE_AFTER_WAIT			18	/* asleep */
#define FINISHED_WHOLE			19	/* met: claimed and finished in one */
#define FINISHED_LATER			20	/* met: finished in a second transaction */
#define STEP_KEPT				21	/* met: resumed after the effect */
#define SWEPT_FINISHED			22	/* met */
#define SWEPT_UNFINISHED		23	/* met */
#define MISSED					24	/* met: a row that is there, by a probe */
#define CRASHED					25	/* met: with something uncommitted */
#define LAST_REPLAYED			26	/* met */
#define LAST_WORKED				27	/* met */

/* ------------------------------------------------------------------
 *		The end of a transaction
 * ------------------------------------------------------------------ */

inline clear(r)
{
	r.state = FREE;
	r.speculative = 0;
	r.released = 0;
	r.anew = 0;
	r.attempt = 0;
	r.effect = 0
}

inline copy(to, from)
{
	to.state = from.state;
	to.released = from.released;
	to.attempt = from.attempt;
	to.effect = from.effect
}

/* The version that some have found is dead. */
inline tell_finders(what)
{
	for (q : 1 .. LAST) {
		if
		:: found[q].now != NOT_FOUND -> found[q].now = what
		:: else
		fi
	}
}

inline take_effect(me)
{
	no_second_effect = (effect == 0);
	assert(no_second_effect);
	effect = pending[me].effect;
	pending[me].effect = 0
}

/* COMMIT: all that the transaction did stands, at one moment. */
inline commit(me)
{
	found[me].now = NOT_FOUND;
	one_row = (next[me].state == FREE || row.state == FREE || xmax == me);

	if
	:: xmax == me && change == UPDATES ->
		if
		:: next[me].anew -> effect = 0
		:: else
		fi;
		tell_finders(UPDATED)
	:: xmax == me && change == DELETES ->
#ifndef SWEEP_LIVE
		effect = 0;				/* its life was over */
#endif
		tell_finders(DELETED);
		clear(row)
	:: else
	fi;
	if
	:: xmax == me -> xmax = 0; change = NOTHING
	:: else
	fi;

	if
	:: pending[me].effect != 0 -> take_effect(me)
	:: else
	fi;
	assert(one_row);
	if
	:: next[me].state != FREE ->
		copy(row, next[me]);
		clear(next[me]);
		memory_is_effect = (row.effect == effect);
		assert(memory_is_effect)
	:: else
	fi
}

/* ROLLBACK, an error, a killed backend, a crash: nothing of it stands. */
inline abort(me)
{
	if
	:: next[me].state != FREE || xmax == me -> MET(CRASHED)
	:: else
	fi;
	clear(next[me]);
#ifndef LOCK_OUTLIVES
	if
	:: xmax == me -> xmax = 0; change = NOTHING
	:: else
	fi;
#endif
	pending[me].effect = 0;
	found[me].now = NOT_FOUND
}

/* ------------------------------------------------------------------
 *		store.c
 * ------------------------------------------------------------------ */

#define IS_SPECULATIVE(w)	(next[w].speculative)
#define IS_FIRM(w)			(next[w].state != FREE && !next[w].speculative)
#define IS_THERE(w)			(next[w].state != FREE)
#if CLIENTS == 2
#define ANY(is)		(is(1) || is(2) || is(3))
#else
#define ANY(is)		(is(1) || is(2) || is(3) || is(4))
#endif

/*
 * idem_store_probe(), of the dirty snapshot: sets seen.  (Locked is not
 * changing.  A begin is the first thing that a transaction does here, so
 * nothing of it is its own.)  Where all there is are speculative rows, it
 * waits for the token.
 */
#define SEEN_NOTHING	0
#define SEEN_LEAVING	1
#define SEEN_ARRIVING	2
#define SEEN_SETTLED	3

#define CAN_PROBE	\
	(row.state != FREE || ANY(IS_FIRM) || !ANY(IS_SPECULATIVE))

inline probe()
{
	if
	:: row.state != FREE && change <= LOCKS -> seen = SEEN_SETTLED
	:: !(row.state != FREE && change <= LOCKS) && ANY(IS_FIRM) ->
		seen = SEEN_ARRIVING
	:: row.state != FREE && change >= UPDATES && !ANY(IS_FIRM) ->
		seen = SEEN_LEAVING
	:: else -> seen = SEEN_NOTHING
	fi
}

/*
 * idem_store_insert(), first half: table_tuple_insert_speculative() and
 * index_insert(UNIQUE_CHECK_PARTIAL).  The index page stays locked from the
 * search for rivals until the entry is in, and before that nobody finds the
 * row.  A rival is any row that a dirty snapshot sees.
 */
inline insert_speculatively(me, rival)
{
#if defined(NO_UNIQUE_CHECK)
	rival = 0;
#elif defined(BLIND_TO_CHANGES)
	rival = (change <= LOCKS && (row.state != FREE || ANY(IS_THERE)));
#else
	rival = (row.state != FREE || ANY(IS_THERE));
#endif
	next[me].state = IN_PROGRESS;
	next[me].speculative = 1
}

/* Is the committed row another's to change? */
#define IS_LOCKED	(change != NOTHING)

/* The second half: table_tuple_complete_speculative() */
inline complete_speculative(me, rival)
{
	if
	:: rival -> clear(next[me])
	:: else -> next[me].speculative = 0; COUNT_FIRST(next[me])
	fi
}

/*
 * idem_store_new_version(copy_row) and idem_store_update() of the committed
 * row, which is locked.  The index entry of the new version, where that is
 * not HOT, is added with UNIQUE_CHECK_YES: a speculative rival is waited for,
 * and has to give way; any other would be an error.
 */
inline update(me)
{
	index_is_free = !ANY(IS_FIRM);
	assert(index_is_free);
	change = UPDATES;
	copy(next[me], row);
	found[me].now = NOT_FOUND
}

/* ------------------------------------------------------------------
 *		claim_begin.c, claim_fence.c, claim_finish.c, claim_lease.c
 * ------------------------------------------------------------------ */

#define NOT_LAST	(me != LAST)

/* Which effect a try has: told apart, or (fewer states) that it has one */
#ifdef EFFECTS_DIFFER
#define THIS_EFFECT	((me - 1) * TRIES + try + (me == LAST))
#else
#define THIS_EFFECT	1
#endif

/* Once all others are done, no step may send one back. */
inline let_in(is_let_in)
{
	last_is_let_in = (NOT_LAST || is_let_in);
	assert(last_is_let_in)
}

/* The assumption, see above */
#ifdef SLEEPER
#define NOBODY_SLEEPS	1
#else
#define NOBODY_SLEEPS	(workers == 0)
#endif

/* what idem_begin decides: Action */
#define UNDECIDED	0
#define REPLAY		1			/* the client is done */
#define BUSY		2			/* in_progress */
#define INSERT		3
#define RECLAIM		4
#define RESUME		5
#define CRASH		6			/* it ends before it has decided */

/* replay(), which tells the row r */
inline replay(r)
{
	answer_is_effect = (effect != 0 && r.effect == effect);
	assert(answer_is_effect);
	MET(REPLAYED);
	action = REPLAY
}

/* decide() */
inline decide(me)
{
	if
	:: seen == SEEN_NOTHING -> action = INSERT
	:: seen == SEEN_ARRIVING ->
		MET(SAW_ARRIVING);
		action = BUSY;
#ifdef BELIEVE_UNCOMMITTED
		for (q : 1 .. LAST) {
			if
			:: next[q].state == COMPLETED -> replay(next[q])
			:: else
			fi
		}
#endif
	:: seen == SEEN_LEAVING -> MET(SAW_LEAVING); action = BUSY
	:: else ->
		if
		:: row.state != IN_PROGRESS && over && NOBODY_SLEEPS ->
			action = RECLAIM
		:: row.state == COMPLETED && !(over && NOBODY_SLEEPS) -> replay(row)
		:: row.state == FAILED && !(over && NOBODY_SLEEPS) -> action = RESUME
#ifdef NO_TAKE_OVER
		:: row.state == IN_PROGRESS && row.released -> action = RESUME
#else
		:: row.state == IN_PROGRESS && (row.released || over) ->
			action = RESUME
#endif
		:: else -> MET(LEASE_LIVES); action = BUSY
		fi
	fi;
	if
	:: action == RECLAIM || action == RESUME -> found[me].now = SAME
	:: else
	fi
}

/* new_claim() or next_attempt(), of the version just made */
inline take(me)
{
	if
	:: action == RECLAIM ->
		MET(RECLAIMED);
		next[me].anew = 1;
		COUNT_FIRST(next[me]);
		next[me].effect = 0
	:: else ->
		if
		:: next[me].state == FAILED -> MET(TOOK_OVER_FAILED)
		:: next[me].state != FAILED && next[me].released ->
			MET(TOOK_OVER_RELEASED)
		:: else -> MET(TOOK_OVER_LOST)
		fi;
		if
		:: next[me].effect != 0 -> MET(STEP_KEPT)
		:: else
		fi;
		COUNT_NEXT(next[me])
	fi;
	next[me].state = IN_PROGRESS;
	next[me].released = 0;
	mine = next[me].attempt;
	known = next[me].effect;
	action = UNDECIDED
}

/* idem_finish(); with the effect, unless that has been recorded before */
inline finish(me)
{
	if
	:: known == 0 -> pending[me].effect = THIS_EFFECT; known = THIS_EFFECT
	:: else
	fi;
#ifdef EFFECT_APART
	if
	:: pending[me].effect != 0 -> take_effect(me)
	:: else
	fi;
#endif
	next[me].state = COMPLETED;
	next[me].effect = known
}

/* idem_finish() with a status that is not kept: the effect was rolled back */
inline fail(me)
{
	next[me].state = FAILED
}

/* idem_checkpoint(), with the effect; without, it changes nothing here */
inline record_step(me)
{
	pending[me].effect = THIS_EFFECT;
	known = THIS_EFFECT;
	next[me].effect = known
}

/* check_attempt(): the fence.  check_unfinished() is apart from it. */
#ifdef NO_FENCE
#define IS_STALE	0
#else
#define IS_STALE	(row.attempt != mine)
#endif
#ifdef NO_FINISHED_CHECK
#define IS_OPEN		1
#else
#define IS_OPEN		(row.state == IN_PROGRESS)
#endif

/* idem_store_lock(true) waits until this holds, or the row is gone. */
#define CAN_LOCK	(found[me].now != DELETED && !IS_LOCKED)

/* ------------------------------------------------------------------
 *		A client
 *
 * One may end at any step, and with it its backend and what that has not
 * committed.  A try after one that was answered is that of a client who has
 * not got the answer.  One may also give up after any try.
 *
 * Clients are alike, so that they come in the order of their numbers takes
 * nothing away.
 * ------------------------------------------------------------------ */

proctype Client(byte me)
{
	unsigned try : 2;
	unsigned action : 3;
	unsigned mine : 4;			/* the attempt that the claim told */
	unsigned known : 3;			/* the effect done already, as it was told */
	bit rival;
	bit answered;				/* the last client only */

	if
	:: !NOT_LAST -> gone == CLIENTS + 1		/* and the sweep */
	:: NOT_LAST -> arrived >= me
	fi;

	/* The end of a try: of its transaction, if that has not committed. */
crash:
ended:
	atomic {
		d_step {
			abort(me);
			action = UNDECIDED; mine = 0; known = 0; rival = 0
		};
		if
		:: NOT_LAST && try > 0 -> try = 0; goto done
		:: NOT_LAST && try < TRIES -> try++
		:: !NOT_LAST && answered -> goto done
		:: !NOT_LAST && !answered -> skip
		fi
	};

	/* idem_begin(): claim() looks and decides */
look:
	atomic {
		if
		:: CAN_PROBE ->
			/* for the last one, leases end some day */
			if
			:: NOT_LAST || row.state != IN_PROGRESS -> over = 0
			:: over = 1
			fi;
			d_step {
				probe();
				decide(me);
				let_in(action != BUSY)
			}
		:: NOT_LAST && (row.state != FREE || ANY(IS_FIRM)) ->
			MET(MISSED);
			action = INSERT
		:: NOT_LAST -> action = CRASH
		fi;
		if
		:: NOT_LAST && arrived == me -> arrived++
		:: else
		fi;
		if
		:: action == REPLAY ->
			if
			:: !NOT_LAST -> answered = 1; MET(LAST_REPLAYED)
			:: else
			fi;
			goto ended
		:: action == BUSY -> action = UNDECIDED; goto busy
		:: action == INSERT -> action = UNDECIDED; goto insert
		:: action == RECLAIM || action == RESUME -> goto lock
		:: action == CRASH -> goto crash
		fi
	};

busy:
	if
	:: goto look				/* idem_store_wait() */
	:: goto ended				/* 409 */
	fi;

	/* idem_store_insert() */
insert:
	if
	:: d_step { insert_speculatively(me, rival) }
	:: NOT_LAST -> goto crash
	fi;
	if
	:: d_step {
			complete_speculative(me, rival);
			let_in(!rival);
			if
			:: rival -> MET(LOST_THE_INSERT)
			:: else -> MET(STARTED); mine = next[me].attempt; known = 0
			fi
		}
	:: NOT_LAST -> goto crash
	fi;
	if
	:: rival -> rival = 0; goto look
	:: else -> goto proceed
	fi;

	/* take_row(): idem_store_lock(false) */
lock:
	if
	:: d_step { found[me].now != SAME ->
			MET(LOCK_CHANGED);
			let_in(0);
			found[me].now = NOT_FOUND; action = UNDECIDED
		};
		goto look
	:: d_step { found[me].now == SAME && IS_LOCKED ->
			MET(LOCK_BUSY);
			let_in(0);
			found[me].now = NOT_FOUND; action = UNDECIDED
		};
		goto busy
	:: d_step { found[me].now == SAME && !IS_LOCKED ->
			xmax = me; change = LOCKS
		}
	:: NOT_LAST -> goto crash
	fi;
	if
	:: d_step { update(me); take(me) }
	:: NOT_LAST -> goto crash
	fi;

	/*
	 * The claim is ours.  Do all in this transaction (idem_finish() finds it
	 * with find_own_claim(), so there is nothing to check), or commit the
	 * claim in progress first.
	 */
proceed:
	if
	:: d_step { finish(me) }
	:: d_step { NOT_LAST -> fail(me) }
	:: d_step { NOT_LAST -> commit(me); workers++ };
		goto find
	:: NOT_LAST -> goto crash
	fi;
	if
	:: d_step {
			if
			:: next[me].state == COMPLETED ->
				MET(FINISHED_WHOLE);
				if
				:: !NOT_LAST -> answered = 1; MET(LAST_WORKED)
				:: else
				fi
			:: else
			fi;
			commit(me)
		};
		goto ended
	:: NOT_LAST -> goto crash
	fi;

	/*
	 * Work goes on outside of any transaction.  What it does in the next one
	 * does not matter until it has the lock: idem_find_and_lock_claim().
	 *
	 * find_claim(), under a fresh snapshot, and the first look
	 */
find:
	if
	:: d_step { row.state != FREE && !IS_STALE && IS_OPEN ->
			found[me].now = SAME
		}
	:: d_step { row.state == FREE -> MET(NO_CLAIM); workers-- };
		goto crash				/* the error ends it */
	:: d_step { row.state != FREE && IS_STALE -> MET(FENCED); workers-- };
		goto crash
	:: d_step { row.state != FREE && !IS_STALE && !IS_OPEN ->
			MET(WAS_FINISHED); workers--
		};
		goto crash
	:: workers--; goto crash
	fi;

	/* idem_store_lock(true) waits, gets the newest version; the second look */
	if
	:: d_step { found[me].now == DELETED ->
			MET(GONE_AFTER_WAIT);
			found[me].now = NOT_FOUND
		};
		goto find
#ifdef NO_SECOND_LOOK
	:: d_step { CAN_LOCK -> xmax = me; change = LOCKS }
#else
	:: d_step { CAN_LOCK && !IS_STALE && IS_OPEN ->
			xmax = me; change = LOCKS
		}
	:: d_step { CAN_LOCK && IS_STALE -> MET(FENCED_AFTER_WAIT); workers-- };
		goto crash
	:: d_step { CAN_LOCK && !IS_STALE && !IS_OPEN ->
			MET(WAS_FINISHED_AFTER_WAIT); workers--
		};
		goto crash
#endif
#ifndef PATIENT
	:: workers--; goto crash	/* a timeout, a cancel */
#endif
	fi;

	if
	:: d_step { update(me); finish(me) }
	:: d_step { update(me); fail(me) }
	:: d_step { known == 0 -> update(me); record_step(me) }
	:: d_step { update(me) }	/* idem_checkpoint(), for the lease */
	:: d_step { update(me); next[me].released = 1 }	/* idem_release() */
	:: workers--; goto crash
	fi;
	if
	:: d_step { next[me].state == IN_PROGRESS && !next[me].released ->
			commit(me)
		};
		goto find
	:: d_step { next[me].state != IN_PROGRESS || next[me].released ->
			if
			:: next[me].state == COMPLETED -> MET(FINISHED_LATER)
			:: else
			fi;
			commit(me);
			workers--
		};
		goto ended
	:: d_step { next[me].state == COMPLETED ->
			/* it has not heard of its COMMIT, and does it all again */
			if
			:: pending[me].effect != 0 -> known = 0
			:: else
			fi;
			commit(me)
		};
		goto find
	:: workers--; goto crash
	fi;

done:
	if
	:: me == LAST ->
		last_is_answered = (row.state == COMPLETED && effect != 0 &&
							row.effect == effect);
		assert(last_is_answered)
	:: else -> gone++
	fi
}

/* ------------------------------------------------------------------
 *		expire_sweep.c
 * ------------------------------------------------------------------ */

/*
 * delete_slice(): SELECT ... FOR UPDATE SKIP LOCKED, then DELETE.  A row that
 * has changed since the snapshot is looked at again as it is locked, so what
 * counts is that moment.  HAS_EXPIRED holds of any row some day; SWEEP_LIVE
 * does without it, so that the life of a key may not be over (commit()).
 */
active proctype Sweep()
{
	do
	:: gone == CLIENTS -> break
	:: d_step { gone < CLIENTS && row.state != FREE && change == NOTHING &&
			NOBODY_SLEEPS ->
			xmax = SWEEPER; change = LOCKS
		};
		if
		:: d_step {
				change = DELETES;
				if
				:: row.state == IN_PROGRESS -> MET(SWEPT_UNFINISHED)
				:: else -> MET(SWEPT_FINISHED)
				fi
			};
			if
			:: d_step { commit(SWEEPER) }
			:: d_step { abort(SWEEPER) }
			fi
		:: d_step { abort(SWEEPER) }
		fi
	od;
	gone++
}

init
{
	atomic {
		run Client(1);
		run Client(2);
#if CLIENTS > 2
		run Client(3);
#endif
		run Client(LAST)
	}
}
