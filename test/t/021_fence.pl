# The promise: a worker that has lost its claim cannot do any harm.  Whatever
# its transaction has written goes with it when it tries to finish, at every
# isolation level and however the two race.  And around that: what a lease, an
# attempt, a policy and a completer mean between sessions.
#
# "A" is the worker that falls asleep, "B" the one that takes its claim over.
# A lease is made to end by setting it into the past, not by waiting for it.

use strict;
use warnings;

use FindBin;
use lib $FindBin::RealBin;
use PgIdemTest;
use PostgreSQL::Test::Cluster;
use PostgreSQL::Test::Utils;
use Test::More;

my $node = new_node('main', <<EOC);
EOC

$node->safe_psql('postgres', <<'EOS');
CREATE EXTENSION pg_idem;
CREATE TABLE charges (key text NOT NULL, worker text NOT NULL);
CREATE TABLE audit (key text NOT NULL);
EOS

my ($psql, $A, $B) =
  map { PgIdemTest::Session->new($node, 'postgres') } 1 .. 3;

my @levels = ('READ COMMITTED', 'REPEATABLE READ', 'SERIALIZABLE');

# ---------------------------------------------------------------------
# Words of the tests
# ---------------------------------------------------------------------

sub begin
{
	my ($key, %arg) = @_;
	my $route = $arg{route} || 'POST /charges';
	my $more = $arg{more} || '';

	return
	  "SELECT proceed, outcome, status, attempt FROM idem_begin('$key',"
	  . " '$route', idem_hash_text('$key')$more);";
}

sub finish
{
	my ($key, $attempt, $status) = @_;
	my $fence = defined $attempt ? ", attempt => $attempt" : '';

	$status ||= 201;
	return
	  "SELECT idem_finish('$key', '{\"attempt\": "
	  . (defined $attempt ? $attempt : 'null')
	  . "}', $status$fence);";
}

sub charge
{
	my ($key, $worker) = @_;
	return "INSERT INTO charges VALUES ('$key', '$worker');";
}

# Who has charged for a key
sub charged_by
{
	my ($key) = @_;
	return $psql->query(
		"SELECT string_agg(worker, ',') FROM charges WHERE key = '$key'");
}

sub end_lease
{
	my ($key) = @_;
	$psql->query(<<EOS);
UPDATE idempotency_keys SET lease_until = clock_timestamp() - interval '1 s'
WHERE key = '$key' AND state = 'in_progress'
EOS
	return;
}

# A claims a key, commits, and sleeps past its lease.
sub claimed_and_lost
{
	my ($key) = @_;

	local $Test::Builder::Level = $Test::Builder::Level + 1;
	is($A->query(begin($key)), 't|started||1', "$key: A claims");
	end_lease($key);
	return;
}

# The last error that a session got: its SQLSTATE
sub has_failed
{
	my ($session, $stale_only, $what) = @_;
	my ($state) = $session->{err} =~ /ERROR:  ([0-9A-Z]{5}):/;

	local $Test::Builder::Level = $Test::Builder::Level + 1;
	like(
		$state || '00000',
		$stale_only ? qr/^IK001$/ : qr/^(?:IK001|40001)$/,
		$what) or diag($session->{err});
	return;
}

sub wait_for_lock
{
	my ($session) = @_;
	return wait_until(
		sub {
			$psql->query(
				"SELECT wait_event_type = 'Lock' FROM pg_stat_activity"
				  . " WHERE pid = $session->{pid}") eq 't';
		});
}

# ---------------------------------------------------------------------
# A has lost its claim
# ---------------------------------------------------------------------

my $n = 0;

foreach my $level (@levels)
{
	my $BEGIN = "BEGIN ISOLATION LEVEL $level;";
	my $read_committed = $level eq 'READ COMMITTED';

	# B has finished, or only resumed; A's transaction begins after that, or
	# was there before, with a snapshot in which the claim is still A's.
	foreach my $b_finishes (1, 0)
	{
		foreach my $a_was_there (0, 1)
		{
			my $key = 'lost-' . ++$n;
			my $what = join(', ',
				$level,
				$b_finishes ? 'B has finished' : 'B has resumed',
				$a_was_there ? 'A has a snapshot' : 'A begins anew');

			claimed_and_lost($key);
			$A->query("$BEGIN SELECT 1;") if $a_was_there;

			is($B->query($BEGIN . begin($key)),
				't|resumed||2', "$what: B resumes with attempt 2");
			if ($b_finishes)
			{
				$B->query(charge($key, 'B') . finish($key, 2));
			}
			$B->query('COMMIT');

			$A->query($BEGIN) unless $a_was_there;
			$A->query(charge($key, 'A'));
			$A->error(finish($key, 1));
			has_failed($A, $read_committed || !$a_was_there, "$what: A fails");
			$A->query('COMMIT');

			if ($b_finishes)
			{
				is($psql->query(begin($key)),
					'f|replayed|201|2', "$what: B's answer stands");
			}
			else
			{
				is($psql->query(begin($key)),
					'f|in_progress|409|2', "$what: the claim is B's");
				$B->query(
					$BEGIN . charge($key, 'B') . finish($key, 2) . 'COMMIT');
			}
			is(charged_by($key), 'B', "$what: B has charged, and nobody else");
		}
	}

	# Without its attempt A gets no further, in whichever state the claim is.
	{
		my $key = 'unnamed-' . ++$n;
		my $what = "$level: A does not say its attempt";

		claimed_and_lost($key);
		$A->query($BEGIN . charge($key, 'A'));
		is($A->error(finish($key)), 'IK001', "$what, its lease is over");
		$A->query('COMMIT');
		$B->query(begin($key));
		$A->query($BEGIN . charge($key, 'A'));
		is($A->error(finish($key)), 'IK001', "$what, B has resumed");
		$A->query('COMMIT');
		$B->query(finish($key, 2));
		$A->query($BEGIN . charge($key, 'A'));
		is($A->error(finish($key)), 'IK003', "$what, B has finished");
		$A->query('COMMIT');
		is(charged_by($key), '', "$what: no charge");
	}

	# B has not committed its take-over yet: A waits for what becomes of it.
	foreach my $end ('COMMIT', 'ROLLBACK')
	{
		foreach my $b_finishes (0, 1)
		{
			my $key = 'race-' . ++$n;
			my $what = join(', ', $level, 'both race',
				$b_finishes ? 'B finishes' : 'B resumes', "B's $end");

			claimed_and_lost($key);
			is($B->query($BEGIN . begin($key)), 't|resumed||2', "$what: B");
			$B->query(charge($key, 'B') . finish($key, 2)) if $b_finishes;

			$A->query($BEGIN . charge($key, 'A'));
			$A->start(finish($key, 1));
			ok(wait_for_lock($A), "$what: A waits for B");
			ok(!$A->is_done, "$what: and still does");
			$B->query($end);
			$A->result;

			if ($end eq 'COMMIT')
			{
				has_failed($A, $read_committed, "$what: A fails");
				$A->query('COMMIT');
				is(charged_by($key), $b_finishes ? 'B' : '', "$what: no charge");
			}
			else
			{
				is($A->{err}, '', "$what: A finishes");
				$A->query('COMMIT');
				is(charged_by($key), 'A', "$what: A has charged");
				is($psql->query(begin($key)),
					'f|replayed|201|1', "$what: with its answer");
			}
		}
	}

	# The other way round: A is just finishing, and B does not wait for it.
	foreach my $end ('COMMIT', 'ROLLBACK')
	{
		my $key = 'finishing-' . ++$n;
		my $what = "$level, A is finishing, A's $end";

		claimed_and_lost($key);
		$A->query($BEGIN . charge($key, 'A') . finish($key, 1));
		is( $B->query($BEGIN . begin($key) . 'COMMIT'),
			'f|in_progress|409|', "$what: B is told so");
		is($B->query("SELECT count(*) FROM idem_resume(100) WHERE key = '$key'"),
			0, "$what: a completer gets nothing");
		$A->query($end);
		if ($end eq 'COMMIT')
		{
			is($B->query($BEGIN . begin($key) . 'COMMIT'),
				'f|replayed|201|1', "$what: B gets its answer");
		}
		else
		{
			is($B->query($BEGIN . begin($key) . 'COMMIT'),
				't|resumed||2', "$what: B resumes");
		}
		is(charged_by($key), $end eq 'COMMIT' ? 'A' : '', "$what: charges");
	}

	# A finishes within a savepoint, and carries on when that fails.
	foreach my $b_finishes (1, 0)
	{
		my $key = 'savepoint-' . ++$n;
		my $what = "$level, savepoint, B "
		  . ($b_finishes ? 'has finished' : 'has resumed');

		claimed_and_lost($key);
		$B->query(begin($key));
		$B->query(charge($key, 'B') . finish($key, 2)) if $b_finishes;

		$A->query("$BEGIN INSERT INTO audit VALUES ('$key');"
			  . 'SAVEPOINT work;'
			  . charge($key, 'A'));
		is($A->error(finish($key, 1)), 'IK001', "$what: A fails");
		$A->query('ROLLBACK TO work');
		is( $A->query(begin($key)),
			$b_finishes ? 'f|replayed|201|2' : 'f|in_progress|409|2',
			"$what: A can still ask what became of it");
		$A->query('COMMIT');
		is(charged_by($key), $b_finishes ? 'B' : '',
			"$what: the charge is gone");
		is($psql->query("SELECT count(*) FROM audit WHERE key = '$key'"),
			1, "$what: what was before the savepoint is not");
	}

	# So does B, whose take-over ends with the savepoint: A has its claim back.
	{
		my $key = 'savepoint-' . ++$n;
		my $what = "$level, B rolls its take-over back to a savepoint";

		claimed_and_lost($key);
		is($B->query("$BEGIN SAVEPOINT s;" . begin($key)),
			't|resumed||2', "$what: B resumes");
		$B->query('ROLLBACK TO s');
		$A->query($BEGIN . charge($key, 'A') . finish($key, 1) . 'COMMIT');
		is(charged_by($key), 'A', "$what: A finishes");
		$B->query('COMMIT');
		is($psql->query(begin($key)), 'f|replayed|201|1',
			"$what: and its answer stands");
	}

	# A checkpoint and a release are fenced like a finish.
	{
		my $key = 'steps-' . ++$n;
		my $checkpoint = "SELECT idem_checkpoint('$key', 'charged'";
		my $release = "SELECT idem_release('$key'";

		claimed_and_lost($key);
		$B->query(begin($key));
		foreach my $call ($checkpoint, $release)
		{
			my $what = "$level: " . ($call =~ /(idem_\w+)/)[0];

			is($A->error("$call, attempt => 1)"), 'IK001', "$what, stale");
			is($A->error("$call)"), 'IK001', "$what, without an attempt");
			is( $A->error(
					$BEGIN
					  . charge($key, 'A')
					  . "$call, attempt => 1); COMMIT"),
				'IK001',
				"$what, stale, with a charge");
			$A->query('ROLLBACK');
			is(charged_by($key), '', "$what: which is not there");
		}
		is( $psql->query(
				"SELECT attempt, step, lease_until > clock_timestamp()"
				  . " FROM idempotency_keys WHERE key = '$key'"),
			'2||t',
			"$level: B's claim is as it was");
		$B->query(finish($key, 2));
		foreach my $call ($checkpoint, $release)
		{
			my $what = "$level: " . ($call =~ /(idem_\w+)/)[0];

			is($A->error("$call, attempt => 1)"),
				'IK001', "$what, stale and finished");
			is($B->error("$call, attempt => 2)"), 'IK003', "$what, finished");
			is($A->error(($call =~ s/'$key'/'nobody'/r) . ', attempt => 1)'),
				'IK002', "$what, no claim");
		}
	}

	# A stale checkpoint that waits for B's take-over
	{
		my $key = 'steps-' . ++$n;
		my $what = "$level: a checkpoint races with a take-over";

		claimed_and_lost($key);
		$B->query($BEGIN . begin($key));
		$A->query($BEGIN . charge($key, 'A'));
		$A->start("SELECT idem_checkpoint('$key', 'late', attempt => 1)");
		ok(wait_for_lock($A), "$what: it waits");
		$B->query('COMMIT');
		$A->result;
		has_failed($A, $read_committed, "$what: and fails");
		$A->query('COMMIT');
		is(charged_by($key), '', "$what: no charge");
	}

	# -----------------------------------------------------------------
	# A is slow, but renews its lease
	# -----------------------------------------------------------------
	{
		my $key = 'slow-' . ++$n;
		my $what = "$level: a slow owner";

		claimed_and_lost($key);
		foreach my $step (1 .. 3)
		{
			is( $A->query(
					$BEGIN
					  . "SELECT idem_checkpoint('$key', 'step $step',"
					  . " jsonb_build_object('n', $step), lease => '1 h', attempt => 1)"
					  . " > clock_timestamp(); COMMIT"),
				't',
				"$what renews, late or not");
			is($B->query($BEGIN . begin($key) . 'COMMIT'),
				'f|in_progress|409|1', "$what is not taken over");
			is( $B->query(
					"SELECT count(*) FROM idem_resume(100) WHERE key = '$key'"),
				0,
				"$what, nor by a completer");

			# it is again late, but not so late that somebody had come
			end_lease($key);
		}

		# nor while the renewal is not yet committed
		$A->query($BEGIN . "SELECT idem_checkpoint('$key', 'last', attempt => 1)");
		is($B->query($BEGIN . begin($key) . 'COMMIT'),
			'f|in_progress|409|', "$what is renewing");
		is($B->query("SELECT count(*) FROM idem_resume(100) WHERE key = '$key'"),
			0, "$what, and a completer passes it by");
		$A->query('COMMIT');
		$A->query($BEGIN . charge($key, 'A') . finish($key, 1) . 'COMMIT');
		is($psql->query(begin($key)), 'f|replayed|201|1', "$what finishes");
		is(charged_by($key), 'A', "$what charges");
	}

	# The renewed lease is what idem_resume and idem_begin go by, and the
	# last checkpoint is what the next owner gets.
	{
		my $key = 'slow-' . ++$n;

		claimed_and_lost($key);
		$A->query("SELECT idem_checkpoint('$key', 'called', '{\"id\": 1}',"
			  . " attempt => 1)");
		end_lease($key);
		is( $B->query(
				"SELECT outcome, attempt, step, step_data FROM"
				  . " idem_begin('$key', 'POST /charges', idem_hash_text('$key'))"
			),
			'resumed|2|called|{"id": 1}',
			"$level: the next owner gets the last checkpoint");
	}

	# A release lets the next one in at once.
	{
		my $key = 'released-' . ++$n;

		$A->query(begin($key));
		is($B->query(begin($key)), 'f|in_progress|409|1',
			"$level: a live lease");
		$A->query($BEGIN . "SELECT idem_release('$key', attempt => 1)");
		is($B->query(begin($key)), 'f|in_progress|409|',
			"$level: a release that is not committed");
		$A->query('COMMIT');
		is($B->query($BEGIN . begin($key) . 'COMMIT'),
			't|resumed||2', "$level: a release that is");
		is($A->error(finish($key, 1)), 'IK001',
			"$level: who has released cannot finish");
	}

	# -----------------------------------------------------------------
	# What is kept of a result
	# -----------------------------------------------------------------
	{
		my $key = 'failing-' . ++$n;
		my $what = "$level: a 503";

		$psql->query("INSERT INTO idem_route_policies (route, max_attempts, keep)"
			  . " VALUES ('three', 3, 'final'), ('all', 3, 'all')"
			  . ' ON CONFLICT DO NOTHING');
		foreach my $attempt (1 .. 3)
		{
			is( $B->query($BEGIN . begin($key, route => 'three')),
				't|' . ($attempt == 1 ? 'started' : 'resumed') . "||$attempt",
				"$what is run again");
			$B->query(finish($key, $attempt, 503) . 'COMMIT');
		}
		is( $B->query($BEGIN . begin($key, route => 'three') . 'COMMIT'),
			'f|replayed|503|3', "$what is replayed when attempts are used up");
		is( $B->query("SELECT state, response FROM idem_lookup('$key', 'three')"),
			'failed|{"attempt": 3}', "$what: the last one");

		# the last failure, not the last but one, also for one that was
		# committed in between
		$key = 'declined-' . ++$n;
		$A->query($BEGIN . begin($key, route => 'three')
			  . finish($key, 1, 402) . 'COMMIT');
		is($B->query($BEGIN . begin($key, route => 'three') . 'COMMIT'),
			'f|replayed|402|1', "$level: a 402 is replayed");

		$key = 'broken-' . ++$n;
		$A->query($BEGIN . begin($key, route => 'all')
			  . finish($key, 1, 500) . 'COMMIT');
		is($B->query($BEGIN . begin($key, route => 'all') . 'COMMIT'),
			'f|replayed|500|1', "$level: a 500 is replayed where all are kept");
	}

	# A response over the limit: the work is done, and not done again.
	{
		my $key = 'large-' . ++$n;
		my $what = "$level: a large response";

		$A->query('SET pg_idem.max_response_size = 100');
		$A->query($BEGIN . begin($key) . charge($key, 'A'));
		$A->query("SELECT idem_finish('$key', to_jsonb(repeat('x', 1000)), 201)");
		like($A->{err}, qr/WARNING:  54000: /, "$what: a warning");
		$A->query('COMMIT; RESET pg_idem.max_response_size');
		is(charged_by($key), 'A', "$what: the charge is committed");
		is($B->query($BEGIN . begin($key) . 'COMMIT'),
			'f|expired|410|1', "$what: and not made again");
		is( $psql->query(
				"SELECT state, status, response, result_dropped"
				  . " FROM idempotency_keys WHERE key = '$key'"),
			'completed|201||t',
			"$what is not stored");
	}
}

# ---------------------------------------------------------------------
# Policies change
# ---------------------------------------------------------------------

# What B is told of a claim whose lease is over.  It leaves it as it was.
sub told
{
	my ($key) = @_;
	return $B->query(
		'SAVEPOINT s; ' . begin($key, route => 'changing')
		  . ' ROLLBACK TO s; RELEASE s');
}

foreach my $level (@levels)
{
	my $key = 'policy-' . ++$n;
	my $hold = "INSERT INTO idem_route_policies (route, on_lost_lease)"
	  . " VALUES ('changing', 'hold')";
	my $resume = "DELETE FROM idem_route_policies WHERE route = 'changing'";
	my ($resumed, $unknown) = ('t|resumed||2', 'f|unknown|409|1');

	$A->query(begin($key, route => 'changing'));
	end_lease($key);

	# in an open transaction, whose snapshot is older than the changes
	$B->query("BEGIN ISOLATION LEVEL $level");
	is(told($key), $resumed, "$level: the policy is to resume");
	$A->query("BEGIN; $hold");
	is(told($key), $resumed, "$level: not yet changed");
	$A->query('COMMIT');
	is(told($key), $unknown, "$level: changed at the commit");

	$A->query("BEGIN; $resume");
	is(told($key), $unknown, "$level: not yet changed back");
	$A->query('ROLLBACK');
	is(told($key), $unknown, "$level: nor after all");
	$A->query("BEGIN; SAVEPOINT s; $resume; ROLLBACK TO s; COMMIT");
	is(told($key), $unknown, "$level: nor by what a savepoint took back");
	$A->query($resume);
	is(told($key), $resumed, "$level: changed back at the commit");
	$B->query('COMMIT');

	# between transactions
	$A->query($hold);
	is($B->query("BEGIN ISOLATION LEVEL $level;"
			  . begin($key, route => 'changing') . 'ROLLBACK'),
		$unknown, "$level: the next transaction sees the next change");
	$A->query('TRUNCATE idem_route_policies');
	is($B->query("BEGIN ISOLATION LEVEL $level;"
			  . begin($key, route => 'changing') . 'ROLLBACK'),
		$resumed, "$level: and TRUNCATE is one");

	# its own change is seen by a transaction at once, and is gone with it
	$B->query("BEGIN ISOLATION LEVEL $level; SAVEPOINT mine; $hold");
	is(told($key), $unknown, "$level: a change of one's own");
	$B->query('ROLLBACK TO mine');
	is(told($key), $resumed, "$level: taken back to a savepoint");
	$B->query($hold);
	is(told($key), $unknown, "$level: made again");
	$B->query('ROLLBACK');
	is($B->query('BEGIN;' . begin($key, route => 'changing') . 'ROLLBACK'),
		$resumed, "$level: rolled back");
}

# ---------------------------------------------------------------------
# Completers
# ---------------------------------------------------------------------

# Claims on a route of their own, their leases over
sub lost_claims
{
	my ($route, $count) = @_;

	$A->query("SELECT count((idem_begin('$route-' || i, '$route', NULL)).proceed)"
		  . " FROM generate_series(1, $count) i");
	$psql->query("UPDATE idempotency_keys"
		  . " SET lease_until = clock_timestamp() - interval '1 s'"
		  . " WHERE route = '$route'");
	return;
}

sub resume
{
	my ($route, $max, $more) = @_;
	$more ||= '';
	return "SELECT key FROM idem_resume($max, '$route'$more)";
}

foreach my $level (@levels)
{
	my $route = 'complete-' . ++$n;
	my $BEGIN = "BEGIN ISOLATION LEVEL $level;";

	# one after the other, neither committed
	lost_claims($route, 6);
	my @a = split /\n/, $A->query($BEGIN . resume($route, 2));
	my @b = split /\n/, $B->query($BEGIN . resume($route, 3));
	is(scalar @a, 2, "$level: no more than were asked for");
	is(scalar @b, 3, "$level: nor by the second completer");
	my %seen = map { $_ => 1 } @a, @b;
	is(scalar keys %seen, 5, "$level: each claim to one of them");
	$B->query('ROLLBACK');
	$A->query('COMMIT');
	my @c = split /\n/, $B->query($BEGIN . resume($route, 100) . '; COMMIT');
	%seen = map { $_ => 1 } @a, @c;
	is(scalar @c, 4, "$level: what was rolled back is there again");
	is(scalar keys %seen, 6, "$level: and nothing else");
	is($A->query($BEGIN . resume($route, 100) . '; COMMIT'),
		'', "$level: then there are none");
	is( $psql->query(
			"SELECT DISTINCT attempt, lease_until > clock_timestamp()"
			  . " FROM idempotency_keys WHERE route = '$route'"),
		'2|t',
		"$level: each with its next attempt and a new lease");
	is($A->error("SELECT idem_finish('$route-1', NULL, route => '$route',"
			  . " attempt => 1)"),
		'IK001', "$level: the former owner is fenced off");
	$B->query("SELECT idem_finish('$route-1', NULL, route => '$route',"
		  . " attempt => 2)");

	# Both at the same moment.  A serializable transaction may be told to try
	# again; what it gets then is again nobody else's.
	$route = 'complete-' . ++$n;
	lost_claims($route, 200);
	my @got;
	my ($errors, $serial_errors) = (0, 0);
	for (my $round = 0; $round < 100 && @got < 200; $round++)
	{
		$_->start($BEGIN . resume($route, 20) . '; COMMIT;') foreach $A, $B;
		foreach my $session ($A, $B)
		{
			my $said = $session->result;

			if ($session->{err} eq '')
			{
				push @got, split /\n/, $said;
				next;
			}
			$errors++;
			$serial_errors++ if $session->{err} =~ /ERROR:  40001:/;
			$session->query('ROLLBACK');
		}
	}
	%seen = map { $_ => 1 } @got;
	is($errors, $level eq 'SERIALIZABLE' ? $serial_errors : 0,
		"$level: no error that is not to be expected");
	is(scalar @got, 200, "$level: at once they get all");
	is(scalar keys %seen, 200, "$level: and none of them twice");
}

# On hold: only for who says so, unless their owner has let go of them.
{
	$psql->query("INSERT INTO idem_route_policies (route, on_lost_lease, max_attempts)"
		  . " VALUES ('held', 'hold', NULL), ('tired', 'resume', 1)");
	lost_claims('held', 3);
	is($B->query(resume('held', 100)), '', 'claims on hold are not resumed');
	is($B->query("SELECT proceed, outcome, status FROM"
			  . " idem_begin('held-1', 'held', NULL)"),
		'f|unknown|409', 'nor by a begin');
	is($B->query("SELECT count(*) FROM idem_unfinished WHERE route = 'held'"),
		3, 'but they are told to be unfinished');

	$A->query("SELECT idem_release('held-2', attempt => 1)");
	is($B->query(resume('held', 100)), 'held-2', 'except one that was released');
	$psql->query("UPDATE idempotency_keys SET lease_until = '-infinity'"
		  . " WHERE key = 'held-2'");
	is($B->query("SELECT proceed, outcome, attempt FROM"
			  . " idem_begin('held-2', 'held', NULL)"),
		't|resumed|3', 'which a begin resumes, too');

	is($B->query("SELECT string_agg(key, ',' ORDER BY key) FROM ("
			  . resume('held', 100, ', held => true') . ') r'),
		'held-1,held-3', 'a person may resume them');

	lost_claims('tired', 1);
	is($B->query(resume('tired', 100)), '',
		'claims without attempts left are not resumed');
	is($B->query(resume('tired', 100, ', held => true')),
		'tired-1', 'but by a person');
}

# ---------------------------------------------------------------------
# idem_call
# ---------------------------------------------------------------------

$node->safe_psql('postgres', <<'EOS');
CREATE ROLE app LOGIN;
CREATE ROLE stranger LOGIN;
SELECT idem_grant('app');
GRANT INSERT ON charges TO app;

CREATE FUNCTION pay(request jsonb) RETURNS jsonb LANGUAGE plpgsql AS $$
BEGIN
	INSERT INTO charges VALUES (request->>'key', current_user);
	IF request->>'card' = 'broken' THEN
		RAISE division_by_zero;
	END IF;
	RETURN jsonb_build_object('paid', request->'amount');
END $$;
CREATE FUNCTION secret(request jsonb) RETURNS jsonb LANGUAGE sql
	AS $$ SELECT request $$;
REVOKE ALL ON FUNCTION secret(jsonb) FROM PUBLIC;
CREATE FUNCTION nothing(request jsonb) RETURNS jsonb LANGUAGE sql
	AS $$ SELECT NULL::jsonb $$;
CREATE FUNCTION of_text(request text) RETURNS jsonb LANGUAGE sql
	AS $$ SELECT to_jsonb(request) $$;
CREATE FUNCTION to_text(request jsonb) RETURNS text LANGUAGE sql
	AS $$ SELECT request::text $$;
CREATE FUNCTION to_set(request jsonb) RETURNS SETOF jsonb LANGUAGE sql
	AS $$ SELECT request $$;
CREATE FUNCTION of_two(request jsonb, more jsonb) RETURNS jsonb LANGUAGE sql
	AS $$ SELECT request || more $$;
EOS

my $app = PgIdemTest::Session->new($node, 'postgres', 'app');

sub call
{
	my ($key, $work, $card) = @_;
	$card ||= 'good';
	return
	  "SELECT proceed, outcome, status, response, attempt FROM idem_call('$key',"
	  . " 'call', '{\"key\": \"$key\", \"amount\": 5, \"card\": \"$card\"}',"
	  . " $work)";
}

foreach my $level (@levels)
{
	my $BEGIN = "BEGIN ISOLATION LEVEL $level;";
	my $key = 'call-' . ++$n;

	is($app->query($BEGIN . call($key, "'pay(jsonb)'") . ';COMMIT'),
		'f|started|200|{"paid": 5}|1', "$level: idem_call works");
	is($app->query($BEGIN . call($key, "'pay(jsonb)'") . ';COMMIT'),
		'f|replayed|200|{"paid": 5}|1', "$level: and replays");
	is(charged_by($key), 'app', "$level: one charge, by the caller");
	is($app->query($BEGIN . call($key, "'pay(jsonb)'", 'another') . ';COMMIT'),
		'f|mismatch|422||', "$level: another request is none");

	# an error leaves nothing
	$key = 'call-' . ++$n;
	is($app->error($BEGIN . call($key, "'pay(jsonb)'", 'broken')),
		'22012', "$level: an error in the work");
	$app->query('COMMIT');
	is($psql->query("SELECT idem_lookup('$key', 'call') IS NULL"),
		't', "$level: leaves no claim");
	is(charged_by($key), '', "$level: and no charge");
	is($app->query($BEGIN . call($key, "'pay(jsonb)'") . ';COMMIT'),
		'f|started|200|{"paid": 5}|1', "$level: the next call starts");

	# also within a savepoint
	$key = 'call-' . ++$n;
	$app->query("$BEGIN SAVEPOINT s");
	is($app->error(call($key, "'pay(jsonb)'", 'broken')),
		'22012', "$level: an error in a savepoint");
	$app->query('ROLLBACK TO s');
	is($app->query(call($key, "'pay(jsonb)'") . ';COMMIT'),
		'f|started|200|{"paid": 5}|1', "$level: can be made good in it");

	# while another transaction is at it
	$key = 'call-' . ++$n;
	$A->query($BEGIN . call($key, "'pay(jsonb)'"));
	is($app->query($BEGIN . call($key, "'pay(jsonb)'") . ';COMMIT'),
		'f|in_progress|409||', "$level: in progress");
	$A->query('ROLLBACK');

	# a result of NULL is a result
	$key = 'call-' . ++$n;
	is($app->query($BEGIN . call($key, "'nothing(jsonb)'") . ';COMMIT'),
		'f|started|200||1', "$level: work may return NULL");
	is($app->query($BEGIN . call($key, "'nothing(jsonb)'") . ';COMMIT'),
		'f|replayed|200||1', "$level: which is replayed");
}

# What is looked at before the key is even claimed
is($app->error(call('refused', "'secret(jsonb)'")),
	'42501', 'work needs EXECUTE of the caller');
is($app->error(call('refused', "'of_text(text)'")), '42P13', 'work takes jsonb');
is($app->error(call('refused', "'to_text(jsonb)'")), '42P13', 'work returns jsonb');
is($app->error(call('refused', "'to_set(jsonb)'")), '42P13', 'and not a set');
is($app->error(call('refused', "'of_two(jsonb, jsonb)'")),
	'42P13', 'work has one argument');
is($app->error(call('refused', "'min(jsonb)'")),
	'42883', 'work is a function that exists');
is($app->error(call('refused', "NULL")), '22004', 'work is not NULL');
is($app->error(call('refused', "4294967295::oid::regprocedure")),
	'42883', 'no function has this OID');

# granted and revoked under an open session
$psql->query('GRANT EXECUTE ON FUNCTION secret(jsonb) TO app');
like($app->query(call('granted', "'secret(jsonb)'")), qr/^f\|started\|200/,
	'EXECUTE granted');
$psql->query('REVOKE EXECUTE ON FUNCTION secret(jsonb) FROM app');
is($app->error(call('granted', "'secret(jsonb)'")),
	'42501', 'EXECUTE revoked: not even a replay');

# dropped under a prepared statement
$app->query('PREPARE p AS ' . call('prepared', "'nothing(jsonb)'::regprocedure"));
is($app->query('EXECUTE p'), 'f|started|200||1', 'a prepared call');
$psql->query('DROP FUNCTION nothing(jsonb)');
is($app->error('EXECUTE p'), '42883', 'of a function that was dropped');

is($psql->query("SELECT idem_lookup('refused', 'call') IS NULL"),
	't', 'no refused call has claimed its key');
sqlstate_is($node, 'postgres', 'stranger', call('refused', "'pay(jsonb)'"),
	'42501', 'a stranger may not call at all');

$_->quit foreach $psql, $A, $B, $app;
$node->stop;
done_testing();
