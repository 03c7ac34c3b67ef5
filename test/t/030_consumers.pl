# The promise: however often a message is delivered, its work is done once, and
# no message that was acknowledged is without its work.
#
# This test is the broker: it delivers each message until it is acknowledged,
# three in ten of them twice at about the same time, one by one and in batches,
# to eight consumers at all three isolation levels.  A consumer acknowledges
# when its COMMIT has succeeded.  Meanwhile work is rolled back,
# acknowledgements are lost, consumers and their backends are killed, and once
# the whole server.  Nothing in the table of the work keeps it from being done
# twice.
#
# PG_IDEM_LONG=1 sends a hundred thousand messages; without, it is a tenth.

use strict;
use warnings;

use FindBin;
use lib $FindBin::RealBin;
use IO::Handle;
use IO::Select;
use IPC::Open3;
use List::Util qw(min shuffle);
use PgIdemTest;
use PostgreSQL::Test::Cluster;
use PostgreSQL::Test::Utils;
use Test::More;

my $messages = $ENV{PG_IDEM_LONG} ? 100_000 : 10_000;
my $consumers = 8;
my $bound = $PostgreSQL::Test::Utils::timeout_default || 180;

my $node = new_node('main', <<EOC);
restart_after_crash = on
EOC
$node->safe_psql('postgres',
	'CREATE EXTENSION pg_idem; CREATE TABLE work (message text)');
my $psql = PgIdemTest::Session->new($node, 'postgres');

local $SIG{PIPE} = 'IGNORE';
my $seed = srand;
note("srand $seed");

# ---------------------------------------------------------------------
# The queue: three messages in ten twice, the second copy soon after the first
# ---------------------------------------------------------------------

my @queue = map { [ $_, "message-$_" ] } 1 .. $messages;
push @queue, map { [ $_ + rand(60), "message-$_" ] }
  grep { $_ % 10 < 3 } 1 .. $messages;
@queue = map { $_->[1] } sort { $a->[0] <=> $b->[0] } @queue;

# What has been acknowledged is done with, whatever becomes of another copy of
# it.  So a message is lost if it is acknowledged on the strength of work that
# is rolled back afterwards.
my %acknowledged;

sub put_back
{
	push @queue, grep { !$acknowledged{$_} } @_;
	return;
}

my $deliveries = 0;    # made so far
my %answers;           # how many of them ended with which SQLSTATE
my %lost = (rollback => 0, acknowledgement => 0, connection => 0);
my $refused_waiting = 0;

# ---------------------------------------------------------------------
# The consumers: a psql each
# ---------------------------------------------------------------------

my $errors = "$PostgreSQL::Test::Utils::tmp_check/030_consumers.err";
open(my $error_log, '>', $errors) or die "$errors: $!";
my $select = IO::Select->new;
my %consumer;          # by the file number of its output

sub start_consumer
{
	my ($in, $out);
	my $pid = open3(
		$in, $out, '>&' . fileno($error_log),
		$node->installed_command('psql'),
		'-XAtq', '-v', 'VERBOSITY=verbose',
		'-d', $node->connstr('postgres') . " application_name='consumer'");

	$in->autoflush(1);
	$select->add($out);
	$consumer{ fileno $out } = { pid => $pid, in => $in, out => $out, buffer => '' };
	return $consumer{ fileno $out };
}

sub end_consumer
{
	my ($c) = @_;

	$select->remove($c->{out});
	delete $consumer{ fileno $c->{out} };
	close $c->{in};
	close $c->{out};
	waitpid($c->{pid}, 0);
	put_back(@{ $c->{ids} }) if $c->{ids};
	return;
}

# The script for a delivery.  A message alone or a batch; ready to wait for
# another consumer or not; now and then it is received, undone, and received
# again.
sub script
{
	my ($d) = @_;
	my @ids = map { "'$_'" } @{ $d->{ids} };
	my $wait = $d->{waits} ? ", wait => '1 day'" : '';
	my $work =
	  @ids == 1
	  ? "INSERT INTO work SELECT $ids[0] WHERE idem_receive('c', $ids[0]$wait);"
	  : 'INSERT INTO work SELECT m FROM idem_receive_batch(\'c\', ARRAY['
	  . join(', ', @ids) . "]$wait) m;";

	return join("\n",
		"BEGIN ISOLATION LEVEL $d->{level};",
		$d->{undo} ? ('SAVEPOINT s;', $work, 'ROLLBACK TO s;') : (),
		$work,
		'\set work :SQLSTATE',
		$d->{rolls_back} ? 'ROLLBACK;' : 'COMMIT;',
		'\echo done :work :SQLSTATE',
		'');
}

# Give a consumer what is next in the queue, in any order.
sub deliver
{
	my ($c) = @_;
	my $n = rand() < 0.4 ? 1 : 1 + int(rand(20));

	$c->{ids} = [ shuffle splice(@queue, 0, min($n, scalar @queue)) ];
	$c->{waits} = rand() < 0.7;
	$c->{undo} = rand() < 0.1;
	$c->{rolls_back} = rand() < 0.1;
	$c->{level} =
	  ('READ COMMITTED', 'REPEATABLE READ', 'SERIALIZABLE')[ int(rand(3)) ];
	$deliveries++;
	# if it is gone already, its output will tell
	print { $c->{in} } script($c);
	return;
}

# What a consumer says of a delivery.  Without a word that it has committed, or
# if that word is lost, the messages go back into the queue.
sub answered
{
	my ($c, $work, $end) = @_;
	my @ids = @{ delete $c->{ids} };

	$answers{$work}++;
	$answers{$end}++ if $end ne '00000';
	$refused_waiting++ if $work eq '55P03' && $c->{waits};
	if ($c->{rolls_back})
	{
		$lost{rollback}++;
	}
	elsif ($work eq '00000' && $end eq '00000')
	{
		if (rand() < 0.1)
		{
			$lost{acknowledgement}++;
		}
		else
		{
			@acknowledged{@ids} = (1) x @ids;
		}
	}
	put_back(@ids);
	return;
}

# Read what a consumer says.
sub listen_to
{
	my ($c) = @_;

	if (!sysread($c->{out}, $c->{buffer}, 4096, length $c->{buffer}))
	{
		$lost{connection}++;
		end_consumer($c);
		return;
	}
	answered($c, $1, $2) if $c->{buffer} =~ s/^done (\S+) (\S+)\n//;
	return;
}

# ---------------------------------------------------------------------
# What goes wrong
# ---------------------------------------------------------------------

# The backend of a consumer, of one that is at work if there is any
sub a_backend
{
	return $psql->query(
		'SELECT pid FROM pg_stat_activity'
		  . " WHERE application_name = 'consumer'"
		  . " ORDER BY state = 'idle', random() LIMIT 1");
}

my $terminated = 0;

sub terminate_a_backend
{
	my $pid = a_backend() || return;

	$terminated++ if $psql->query("SELECT pg_terminate_backend($pid)") eq 't';
	return;
}

sub kill_a_consumer
{
	my ($c) = grep { $_->{ids} } values %consumer;

	kill 9, $c->{pid} if $c;
	return;
}

# The server restarts all processes.
sub kill_a_backend
{
	my $offset = log_end($node);

	kill 9, a_backend() || $psql->{pid};
	ok( wait_for_log_line(
			$node, qr/all server processes terminated; reinitializing/, $offset),
		'a backend is killed, and the server restarts');
	ok($node->poll_query_until('postgres', 'SELECT 1', '1'), 'and is back');
	$psql->abandon;
	$psql = PgIdemTest::Session->new($node, 'postgres');
	return;
}

# ---------------------------------------------------------------------
# Deliver until everything is acknowledged
# ---------------------------------------------------------------------

my $log = log_end($node);
my $half = int($messages / 20);

while (@queue || grep { $_->{ids} } values %consumer)
{
	start_consumer() while keys %consumer < $consumers;
	foreach my $c (grep { !$_->{ids} } values %consumer)
	{
		last unless @queue;
		deliver($c);
		terminate_a_backend() if $deliveries % 100 == 0;
		kill_a_consumer() if $deliveries % 150 == 0;
		kill_a_backend() if $deliveries == $half;
	}

	my @said = $select->can_read($bound);
	die "no consumer says anything" unless @said;
	listen_to($consumer{ fileno $_ }) foreach @said;
}
end_consumer($_) foreach values %consumer;
note("$deliveries deliveries; lost: "
	  . join(', ', map { "$_ $lost{$_}" } sort keys %lost)
	  . "; terminated: $terminated; "
	  . join(', ', map { "$_: $answers{$_}" } sort keys %answers));

is( $psql->query('SELECT count(*), count(DISTINCT message) FROM work'),
	"$messages|$messages",
	'every message is done, and done once');
is( $psql->query(
		"SELECT count(*), count(DISTINCT key) FROM idempotency_keys"
		  . " WHERE route = 'c' AND state = 'completed'"),
	"$messages|$messages",
	'and remembered');
is( $psql->query(
		'SELECT count(*) FROM idempotency_keys k FULL JOIN work w'
		  . ' ON w.message = k.key WHERE k.key IS NULL OR w.message IS NULL'),
	0,
	'no work without its memory, no memory without its work');
is( $psql->query(
		"SELECT count(*) FROM idem_receive_batch('c',"
		  . " (SELECT array_agg(message) FROM work))"),
	0,
	'none of them is new');

# the tale would prove nothing had it not been told
cmp_ok($deliveries, '>', $half, 'the crash came on the way');
cmp_ok($lost{$_}, '>', 0, "lost on the way: $_") foreach sort keys %lost;
cmp_ok($terminated, '>', 0, 'backends were terminated');

# Whoever was ready to wait got an answer, batches in any order included.
is($refused_waiting, 0, 'nobody waited in vain');
is(join(',', grep { !/^(00000|55P03|40001|25P02)$/ } sort keys %answers),
	'', 'no other errors came up');
unlike(log_since($node, $log), qr/deadlock detected|duplicate key|TRAP|PANIC/,
	'nor in the log of the server');

# ---------------------------------------------------------------------
# Two batches in opposite orders, both of which have to wait: the first for b,
# having a; the second for a, having nothing.
# ---------------------------------------------------------------------

sub is_waiting
{
	my ($session) = @_;
	return wait_until(
		sub {
			$psql->query(
				'SELECT count(*) FROM pg_stat_activity'
				  . " WHERE pid = $session->{pid} AND state = 'active'"
				  . " AND wait_event IN ('Extension', 'IdemWait')") eq '1';
		});
}

foreach my $end ('COMMIT', 'ROLLBACK')
{
	my ($holder, $first, $second) =
	  map { PgIdemTest::Session->new($node, 'postgres') } 1 .. 3;
	my $call = "SELECT string_agg(m, ',') FROM idem_receive_batch('$end',"
	  . " ARRAY[%s], wait => '10 min') m";

	$holder->query("BEGIN; SELECT idem_receive('$end', 'b')");
	$first->start('BEGIN; ' . sprintf($call, "'a', 'b', 'c'"));
	ok(is_waiting($first), 'a batch waits');
	$second->start('BEGIN; ' . sprintf($call, "'c', 'b', 'a'"));
	ok(is_waiting($second), 'and another one, in the opposite order');
	$holder->query('ROLLBACK');
	is($first->result, 'a,b,c', 'the first gets all');
	$first->query($end);
	is($second->result, $end eq 'COMMIT' ? '' : 'c,b,a',
		"$end of the first: the second gets what is left");
	$second->query('COMMIT');
	$_->quit foreach $holder, $first, $second;
}

$psql->quit;
done_testing();
