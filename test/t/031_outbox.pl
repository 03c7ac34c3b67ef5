# The promise: what a transaction has published is delivered if it commits, and
# not otherwise; whatever dies on the way, nothing is lost, nothing has its
# effect twice, and inside a group nothing overtakes.  What cannot be
# delivered ends as a dead letter that says why, and holds up nobody.
#
# The relay and the consumer are those of test/clients, which the README
# points at.  What dies is a process.

use strict;
use warnings;

use FindBin;
use lib $FindBin::RealBin;
use PgIdemTest;
use POSIX qw(:sys_wait_h);
use PostgreSQL::Test::Cluster;
use PostgreSQL::Test::Utils;
use Test::More;
use Time::HiRes qw(usleep);

eval { require DBD::Pg; 1 }
  or plan skip_all => 'the relay needs DBD::Pg';

my $node = new_node('main', <<EOC);
pg_idem.expire = off
max_connections = 60
EOC

$node->safe_psql('postgres', 'CREATE DATABASE consumer');
$node->safe_psql(
	'consumer', q(
CREATE EXTENSION pg_idem;
CREATE TABLE effects (seq bigint GENERATED ALWAYS AS IDENTITY,
	message_id uuid NOT NULL, group_key text);
));
# n is drawn after the message was published, so inside a group it follows the
# group's order
$node->safe_psql(
	'postgres', q(
CREATE EXTENSION pg_idem;
CREATE TABLE published (n bigint GENERATED ALWAYS AS IDENTITY,
	message_id uuid PRIMARY KEY, group_key text, trouble text);
CREATE FUNCTION publish(topic text, grp text, trouble text DEFAULT NULL,
	max_attempts int DEFAULT 1000) RETURNS uuid LANGUAGE plpgsql AS $$
DECLARE
	m uuid := idem_publish(topic, jsonb_build_object('trouble', trouble),
		grp, max_attempts => max_attempts);
BEGIN
	INSERT INTO published (message_id, group_key, trouble)
		VALUES (m, grp, trouble);
	RETURN m;
END $$;
));
my $psql = PgIdemTest::Session->new($node, 'postgres');
my $consumer = PgIdemTest::Session->new($node, 'consumer');

$ENV{PGHOST} = $node->host;
$ENV{PGPORT} = $node->port;
$ENV{PGDATABASE} = 'postgres';
$ENV{CONSUMER_DB} = 'consumer';

# ---------------------------------------------------------------------
# Relays
# ---------------------------------------------------------------------

my %relays;
my $stderr_file = "$PostgreSQL::Test::Utils::tmp_check/relay.err";

# Start a relay; returns its PID.  %env is its environment besides ours.
sub start_relay
{
	my ($topic, %env) = @_;
	my $pid = fork;

	die "cannot fork: $!" unless defined $pid;
	if ($pid)
	{
		$relays{$pid} = 1;
		return $pid;
	}

	# the child must not run our END blocks, whatever happens
	%ENV = (%ENV, %env);
	open(STDIN, '<', '/dev/null')
	  && open(STDOUT, '>', '/dev/null')
	  && open(STDERR, '>>', $stderr_file)
	  && exec($^X, "$FindBin::RealBin/../clients/relay.pl", $topic);
	POSIX::_exit(127);
}

# Wait for the end of a relay, after a signal if one is named.  Returns its
# wait status.
sub end_relay
{
	my ($pid, $signal) = @_;

	kill $signal, $pid if $signal;
	waitpid($pid, 0);
	delete $relays{$pid};
	return $?;
}

END
{
	kill 'KILL', keys %relays if %relays;
}

# The leases of all messages end.  (Waits for a relay's transaction, if the
# server has not yet noticed that it is gone.)
sub end_leases
{
	$psql->query(
		"UPDATE idem_outbox SET lease_until = '2000-01-01' WHERE lease_until IS NOT NULL"
	);
	return;
}

sub pending
{
	my ($topic) = @_;
	return $psql->query(
		"SELECT count(*) FROM idem_outbox WHERE topic = '$topic' AND dead_at IS NULL"
	);
}

sub effects
{
	my ($message_id) = @_;
	return $consumer->query(
		"SELECT count(*) FROM effects WHERE message_id = '$message_id'");
}

# ---------------------------------------------------------------------
# Nobody dies
# ---------------------------------------------------------------------

{
	my $relay = start_relay('calm');
	my $message = $psql->query("SELECT publish('calm', NULL)");

	$psql->query("BEGIN; SELECT publish('calm', NULL); ROLLBACK");
	ok(wait_until(sub { pending('calm') == 0 }), 'a message is delivered')
	  or diag(slurp_file($stderr_file));
	is(effects($message), 1, 'once');
	is($consumer->query('SELECT count(*) FROM effects'),
		1, 'and one of a transaction that was rolled back is not');
	is(end_relay($relay, 'TERM'), 0, 'the relay stops when told to');
}

# ---------------------------------------------------------------------
# Death at each step
# ---------------------------------------------------------------------

# The step; how many effects there are by then; how many times it is taken.
foreach my $death (
	[ 'after the take', 0, 2 ],
	[ 'during the delivery', 0, 2 ],
	[ 'after the delivery', 1, 2 ],
	[ 'after the done', 1, undef ])
{
	my ($step, $effects, $attempts) = @$death;
	my $what = "death $step";
	my $message = $psql->query("SELECT publish('steps', NULL)");

	is(end_relay(start_relay('steps', DIE_AT => $step, LEASE => '1 day')) & 127,
		9, "$what: the relay is killed");
	is(effects($message), $effects, "$what: effects by then");
	is( $psql->query(
			"SELECT attempt FROM idem_outbox WHERE message_id = '$message'"),
		defined $attempts ? 1 : '',
		"$what: what is left");
	is($psql->query("SELECT count(*) FROM idem_outbox_take('steps', 10)"),
		0, "$what: nobody else gets it while the lease is live");

	end_leases();
	my $relay = start_relay('steps');
	ok(wait_until(sub { pending('steps') == 0 }),
		"$what: the next relay delivers it")
	  or diag(slurp_file($stderr_file));
	is(effects($message), 1, "$what: one effect in the end");
	end_relay($relay, 'TERM');
}

# ---------------------------------------------------------------------
# A storm
# ---------------------------------------------------------------------

{
	my @env = (LEASE => '500 ms', RETRY_AFTER => '20 ms');
	my @storm = map { start_relay('storm', @env) } 1 .. 4;
	my @publishers =
	  map { PgIdemTest::Session->new($node, 'postgres') } 1 .. 4;
	my $late = PgIdemTest::Session->new($node, 'postgres');
	my $killed = 0;
	my $replaced = 0;

	# whoever is dead is replaced; one in three rounds somebody is killed
	my $stir = sub {
		my ($kill) = @_;

		foreach my $pid (@storm)
		{
			kill 'KILL', $pid and $killed++
			  if $kill && rand() < 0.1;
			next unless waitpid($pid, WNOHANG) == $pid;
			delete $relays{$pid};
			$pid = start_relay('storm', @env);
			$replaced++;
		}
	};

	# Transactions that stay open while others, with higher ids, come and go
	$late->query("BEGIN; SELECT publish('storm', NULL), publish('storm', 'late')"
		  . " FROM generate_series(1, 20)");

	# Poison, refusals, and what always fails
	$psql->query(
		q(SELECT publish('storm', NULL, 'refused') FROM generate_series(1, 2);
		SELECT publish('storm', NULL, trouble, 3)
		FROM unnest(ARRAY['kills', 'fails']) trouble, generate_series(1, 2);
		SELECT publish('storm', 'mixed', trouble, CASE WHEN trouble IN ('kills', 'fails') THEN 3 ELSE 1000 END)
		FROM unnest(ARRAY[NULL, 'kills', NULL, 'fails', NULL, 'refused', NULL])
			WITH ORDINALITY t (trouble, i) ORDER BY i));

	foreach my $round (1 .. 12)
	{
		# each transaction with one group, so that they wait but do not lock
		# each other out; some are rolled back
		$_->start(
			qq(DO \$\$ BEGIN FOR i IN 1 .. 10 LOOP
				PERFORM publish('storm', CASE WHEN random() < 0.7 THEN 'g' || g END,
					CASE WHEN random() < 0.2 THEN 'sometimes' END)
				FROM (SELECT (random() * 5)::int AS g) g, generate_series(1, 3);
				IF random() < 0.2 THEN ROLLBACK; ELSE COMMIT; END IF;
			END LOOP; END \$\$)) foreach @publishers;
		$stir->(1);
		$_->result foreach @publishers;
		is(join('', map { $_->{err} } @publishers), '', "round $round");
		$stir->(1);
		$late->query('COMMIT') if $round == 6;
	}

	ok( wait_until(
			sub {
				$stir->(0);
				return pending('storm') == 0;
			}),
		'everything is delivered, or dead');
	note("killed $killed, replaced $replaced");
	cmp_ok($killed, '>', 0, 'some relays were killed');
	cmp_ok($replaced, '>=', $killed + 3, 'and poison has killed more');
	end_relay($_, 'TERM') foreach @storm;

	# Compare what was published with what came of it.
	my $published = $psql->query(
		"SELECT string_agg(message_id::text, ',') FROM published
		WHERE coalesce(trouble, 'sometimes') = 'sometimes'");
	my $n = $psql->query("SELECT count(*) FROM published");
	cmp_ok($n, '>', 500, "$n messages were published");

	# (a relay that fails to deliver may be killed before it can say so)
	my $dead = $psql->query(q(
		SELECT p.trouble, min(d.last_error), count(*)
		FROM published p JOIN idem_outbox_dead d ON d.message_id = p.message_id
			AND (d.last_error = 'cannot be delivered') IS NOT TRUE
		GROUP BY 1 ORDER BY 1));
	like( $dead,
		qr/^(?:fails\|attempt 3 ended without an answer\|[1-3]\n)?kills\|attempt 3 ended without an answer\|3\nrefused\|refused: no such customer\|3\z/,
		'the dead letters say why');
	is( $psql->query(q(
		SELECT p.trouble, count(*)
		FROM idem_outbox_dead d JOIN published p USING (message_id)
		GROUP BY 1 ORDER BY 1)),
		"fails|3\nkills|3\nrefused|3",
		'and are those that cannot be delivered');
	is( $psql->query(
			"SELECT topic, pending, taken, failing, oldest, dead FROM idem_outbox_topics"),
		'storm|0|0|0||9',
		'and there is nothing else in the outbox');
	is( scalar(() = slurp_file($node->logfile) =~
			  /LOG:  message [-0-9a-f]{36} of topic "storm" is a dead letter/g),
		9,
		'the log names each');

	is( $consumer->query(
			"SELECT count(*) FROM unnest(string_to_array('$published', ',')::uuid[]) m
			WHERE (SELECT count(*) FROM effects e WHERE e.message_id = m) <> 1"),
		0,
		'each of the others has had its effect, once');
	is( $consumer->query(
			"SELECT count(*) FROM effects
			WHERE message_id <> ALL (string_to_array('$published', ',')::uuid[])"),
		0,
		'and nothing else has had one');

	# n in the order of the effects, group by group
	my $order = $consumer->query(
		"SELECT string_agg(message_id::text, ',' ORDER BY seq) FROM effects
		WHERE group_key IS NOT NULL");
	my $grouped = $psql->query(
		"SELECT count(*), count(DISTINCT group_key) FROM published
		WHERE group_key IS NOT NULL");
	note("messages in groups, and groups: $grouped");
	is( $psql->query(
			"SELECT count(*) FROM (
				SELECT n < lag(n) OVER (PARTITION BY group_key ORDER BY i) AS overtaken
				FROM unnest(string_to_array('$order', ',')::uuid[])
					WITH ORDINALITY o (message_id, i) JOIN published USING (message_id)) x
			WHERE overtaken"),
		0,
		'nothing has overtaken inside a group');
	$_->quit foreach @publishers, $late;

	# What a person has put right is delivered after all.
	$psql->query(
		"UPDATE idem_outbox SET payload = '{}'; SELECT idem_outbox_redrive('storm')"
	);
	my $relay = start_relay('storm');
	ok(wait_until(sub { pending('storm') == 0 }), 'redriven')
	  or diag(slurp_file($stderr_file));
	end_relay($relay, 'TERM');
	is($psql->query('SELECT count(*) FROM idem_outbox'), 0, 'nothing is left');
	is( $consumer->query('SELECT count(*), count(DISTINCT message_id) FROM effects'),
		join('|', ($n + 0) x 2),
		'and each message of the test has had one effect');
}

# ---------------------------------------------------------------------
# Notice
# ---------------------------------------------------------------------

{
	my $listener = PgIdemTest::Session->new($node, 'postgres');
	my $heard = sub {
		my ($sql) = @_;
		$psql->query($sql);
		return join ' ', $listener->query('SELECT 1') =~ /payload "(\w+)"/g;
	};

	$listener->query('LISTEN idem_outbox');
	is($heard->("SELECT idem_publish('a', '1'), idem_publish('b', '2'), idem_publish('a', '3')"),
		'a b', 'relays are told of each topic once');
	is($heard->("BEGIN; SELECT idem_publish('a', '1'); ROLLBACK"),
		'', 'not of what is rolled back');
	is($heard->("SELECT idem_publish('a', '1', delay => '1h')"),
		'', 'nor of what is for later');
	is($heard->("SET pg_idem.outbox_notify = off; SELECT idem_publish('a', '1')"),
		'', 'nor with outbox_notify off');
	is( $psql->error("BEGIN; SELECT idem_publish('a', '1', 'g'); PREPARE TRANSACTION 'p'"),
		'00000',
		'then a transaction that has published can be prepared');
	my $other = PgIdemTest::Session->new($node, 'postgres');
	$other->start("SELECT idem_publish('a', '2', 'g')");
	ok( wait_until(
			sub {
				$psql->query("SELECT count(*) FROM pg_locks WHERE NOT granted"
					  . " AND locktype = 'advisory'") == 1;
			}),
		'and keeps its group locked');
	$psql->query("COMMIT PREPARED 'p'");
	$other->result;
	is( $psql->query("SELECT string_agg(payload::text, ' ' ORDER BY id) FROM idem_outbox WHERE group_key = 'g'"),
		'1 2',
		'until it is over');
	$psql->query('RESET pg_idem.outbox_notify');
	is( $psql->error("BEGIN; SELECT idem_publish('a', '1'); PREPARE TRANSACTION 'p'"),
		'0A000',
		'otherwise it cannot');
	$psql->query('ROLLBACK; DELETE FROM idem_outbox');
	$_->quit foreach $listener, $other;
}

# ---------------------------------------------------------------------
# Dump and restore
# ---------------------------------------------------------------------

{
	my $dir = PostgreSQL::Test::Utils::tempdir();
	my $state = 'SELECT * FROM idem_outbox ORDER BY id';

	$psql->query(q(
SELECT idem_publish('t', '{"a": [1, null]}', headers => '{"h": "v"}');
SELECT idem_publish('t', NULL, 'group "1"', delay => '1h', max_attempts => 3);
SELECT idem_publish('t', '"taken"');
SELECT idem_publish('t', '"failing"');
SELECT idem_publish('t', '"dead"');
SELECT id FROM idem_outbox_take('t', 4, '1h');
SELECT idem_outbox_fail(id, 1, 'later', '1h') FROM idem_outbox WHERE payload = '"failing"';
SELECT idem_outbox_fail(id, 1, E'never\n', dead => true) FROM idem_outbox WHERE payload = '"dead"';
));
	my $before = $psql->query($state);
	my $last = $psql->query('SELECT max(id) FROM idem_outbox');

	is(scalar(my @lines = split /\n/, $before =~ s/never\n/never/r), 5,
		'there is something to dump');
	$node->command_ok(
		[ 'pg_dump', '-Fc', '-f', "$dir/archive", $node->connstr('postgres') ],
		'pg_dump');
	$node->command_ok(
		[
			'pg_dump', '--inserts', '-f', "$dir/script",
			$node->connstr('postgres')
		],
		'pg_dump as INSERTs');
	$node->safe_psql('postgres', "CREATE DATABASE $_ TEMPLATE template0")
	  foreach qw(archive script);
	$node->command_ok(
		[
			'pg_restore', '--exit-on-error', '-d', $node->connstr('archive'),
			"$dir/archive"
		],
		'pg_restore');
	$node->command_ok(
		[
			'psql', '-X', '-q', '-v', 'ON_ERROR_STOP=1', '-f', "$dir/script",
			$node->connstr('script')
		],
		'psql');
	foreach my $db (qw(archive script))
	{
		is($node->safe_psql($db, $state), $before, "$db: all messages are there");
		is( $node->safe_psql(
				$db,
				"SELECT idem_publish('t', '1') IS NOT NULL; SELECT max(id) > $last FROM idem_outbox"
			),
			"t\nt",
			"$db: and new ones come behind them");
		is( $node->safe_psql(
				$db,
				q(SELECT payload FROM idem_outbox_take('t', 10);
				SELECT idem_outbox_done(id, 1) FROM idem_outbox WHERE payload = '"taken"';
				SELECT idem_outbox_redrive();
				SELECT payload FROM idem_outbox_take('t', 10))),
			qq(1\n\n1\n"dead"),
			"$db: and they can be worked on");
	}
	$psql->query('DELETE FROM idem_outbox');
}

# ---------------------------------------------------------------------
# Rights
# ---------------------------------------------------------------------

{
	$psql->query(q(
CREATE ROLE app LOGIN;
CREATE ROLE plain LOGIN;
CREATE ROLE keeper;
CREATE SCHEMA trap AUTHORIZATION app;
SELECT idem_grant('app');
CREATE TABLE fired (who text, path text);
GRANT INSERT ON fired TO keeper;
));
	my $app = PgIdemTest::Session->new($node, 'postgres', 'app');
	my $plain = PgIdemTest::Session->new($node, 'postgres', 'plain');
	my %call = (
		idem_publish => "SELECT idem_publish('t', '1')",
		idem_outbox_take => "SELECT idem_outbox_take('t')",
		idem_outbox_done => "SELECT idem_outbox_done(1, 1)",
		idem_outbox_fail => "SELECT idem_outbox_fail(1, 1)",
		idem_outbox_redrive => "SELECT idem_outbox_redrive()");

	is($plain->error($call{$_}), '42501', "a role without rights: $_")
	  foreach sort keys %call;
	foreach my $table (qw(idem_outbox idem_outbox_dead idem_outbox_topics))
	{
		is($plain->error("SELECT FROM $table"), '42501', "a role without rights: $table");
		is($app->error("SELECT FROM $table"), '42501', "an application: $table");
	}
	is($app->error($_), '42501', "an application: $_")
	  foreach "DELETE FROM idem_outbox",
	  "INSERT INTO idem_outbox DEFAULT VALUES",
	  "UPDATE idem_outbox SET payload = '1'",
	  "SELECT nextval('idem_outbox_id_seq')",
	  $call{idem_outbox_redrive};

	# everything that could be in the way of a name or an operator
	$app->query(q(
SET search_path = trap, public, pg_catalog;
CREATE TABLE trap.idem_outbox (id int);
CREATE FUNCTION trap.caught(text, text) RETURNS bool LANGUAGE plpgsql
	AS $$ BEGIN RAISE 'caught'; END $$;
CREATE OPERATOR trap.= (LEFTARG = text, RIGHTARG = text, FUNCTION = trap.caught);
CREATE FUNCTION trap.gen_random_uuid() RETURNS uuid LANGUAGE plpgsql
	AS $$ BEGIN RAISE 'caught'; END $$;
CREATE FUNCTION trap.format(text, int) RETURNS text LANGUAGE plpgsql
	AS $$ BEGIN RAISE 'caught'; END $$;
));
	is( $app->query(q(
SELECT idem_publish('t', '1', 'g') IS NOT NULL;
SELECT payload, attempt FROM idem_outbox_take('t');
SELECT idem_outbox_fail(id, attempt, retry_after => '0') IS NOT NULL FROM idem_outbox_take('t');
)), "t\n1|1", 'an application publishes and takes, whatever its search_path');
	$psql->query("UPDATE public.idem_outbox SET lease_until = '2000-01-01'");
	is( $app->query(q(
SELECT idem_outbox_fail(id, attempt, retry_after => '0') IS NOT NULL FROM idem_outbox_take('t');
SELECT idem_outbox_done(id, attempt) FROM idem_outbox_take('t');
)), "t\n", '... says how it went, and done');

	# A trigger of the table's owner runs as that, and only as that.
	$psql->query(q(
ALTER TABLE idem_outbox OWNER TO keeper;
GRANT USAGE, CREATE ON SCHEMA public TO keeper;
SET ROLE keeper;
CREATE FUNCTION fire() RETURNS trigger LANGUAGE plpgsql AS $$
BEGIN
	INSERT INTO public.fired VALUES (current_user, current_setting('search_path'));
	RETURN coalesce(NEW, OLD);
END $$;
CREATE TRIGGER fire BEFORE INSERT OR UPDATE OR DELETE ON idem_outbox
	FOR EACH ROW EXECUTE FUNCTION fire();
RESET ROLE;
));
	$psql->query(q(
SELECT idem_publish('t', '1');
SELECT idem_outbox_fail(id, attempt, dead => true) FROM idem_outbox_take('t');
SELECT idem_outbox_redrive();
SELECT idem_outbox_done(id, attempt) FROM idem_outbox_take('t');
));
	is( $psql->query('SELECT DISTINCT who, path FROM fired'),
		'keeper|pg_catalog, pg_temp',
		"a trigger of the table's owner runs as the owner");
	is($psql->query('SELECT count(*) FROM fired'), 7, 'each time');
	is($psql->query('SELECT current_user = session_user'), 't', 'and we are who we were');
	$psql->query(q(
CREATE OR REPLACE FUNCTION fire() RETURNS trigger LANGUAGE plpgsql AS $$
BEGIN
	SET LOCAL ROLE NONE;
	RETURN NEW;
END $$));
	is($psql->error("SELECT idem_publish('t', '1')"),
		'42501', 'it cannot become anybody else');
	is($psql->query('SELECT current_user = session_user'),
		't', 'and after an error we are who we were, too');
	$psql->query('DROP FUNCTION fire() CASCADE');
	$_->quit foreach $app, $plain;
}

# ---------------------------------------------------------------------
# The end of dead letters
# ---------------------------------------------------------------------

{
	$psql->query(q(
SELECT idem_publish('t', to_jsonb(i)) FROM generate_series(1, 5) i;
SELECT idem_outbox_fail(id, attempt, dead => true) FROM idem_outbox_take('t', 4);
UPDATE idem_outbox SET dead_at = now() - interval '31 days' WHERE payload IN ('1', '2', '3');
));
	my $end = log_end($node);

	$node->append_conf('postgresql.conf',
		"pg_idem.expire = on\npg_idem.expire_batch = 2\n");
	$node->reload;
	ok( wait_until(
			sub { $psql->query('SELECT count(*) FROM idem_outbox') == 2 }),
		'dead letters go when their time is over');
	is( scalar(() = log_since($node, $end) =~
			  /LOG:  removed dead letter [-0-9a-f]{36} of topic "t"/g),
		3,
		'the log names each');
	is($psql->query('SELECT payload, dead_at IS NULL FROM idem_outbox ORDER BY id'),
		"4|f\n5|t", 'others stay');

	# by hand, and never
	$node->append_conf('postgresql.conf', "pg_idem.expire = off\n");
	$node->reload;
	ok(wait_until(sub { $psql->query('SHOW pg_idem.expire') eq 'off' }), 'no worker');
	$psql->query("UPDATE idem_outbox SET dead_at = '2000-01-01' WHERE payload = '4'");
	$node->append_conf('postgresql.conf', "pg_idem.outbox_dead_ttl = 0\n");
	$node->reload;
	ok( wait_until(sub { $psql->query('SHOW pg_idem.outbox_dead_ttl') eq '0' }),
		'they can be kept');
	$psql->query('SELECT idem_expire()');
	is($psql->query('SELECT count(*) FROM idem_outbox_dead'), 1, 'for ever');
	$node->append_conf('postgresql.conf', "pg_idem.outbox_dead_ttl = 1min\n");
	$node->reload;
	ok( wait_until(sub { $psql->query('SHOW pg_idem.outbox_dead_ttl') eq '1min' }),
		'or not');
	is($psql->query('SELECT idem_expire()'), 0, 'idem_expire counts keys only');
	is($psql->query('SELECT count(*) FROM idem_outbox_dead'), 0, 'but removes them, too');
}

$_->quit foreach $psql, $consumer;
$node->stop;
done_testing();
