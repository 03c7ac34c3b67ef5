# The promise: memory is flat.  A pooled connection makes millions of claims
# in its life; a few bytes lost with each of them would end in the OOM killer
# after some days, and no other test would ever notice.
#
# Measured is what the server itself accounts for in its memory contexts, and
# what the operating system says, which includes what was lost outside them.
# PG_IDEM_LONG=1 runs a million claims; without, it is a fifth of that.

use strict;
use warnings;

use FindBin;
use lib $FindBin::RealBin;
use PgIdemTest;
use PostgreSQL::Test::Cluster;
use PostgreSQL::Test::Utils;
use Test::More;

my $claims = $ENV{PG_IDEM_LONG} ? 1_000_000 : 200_000;

my $node = new_node('main', <<EOC);
pg_idem.expire = off
synchronous_commit = off
shared_buffers = 128MB
max_wal_size = 2GB
jit = off
EOC
$node->safe_psql('postgres', 'CREATE EXTENSION pg_idem');
my $psql = PgIdemTest::Session->new($node, 'postgres');

# bytes in all memory contexts of the session
sub accounted
{
	return $psql->query(
		'SELECT sum(total_bytes) FROM pg_backend_memory_contexts');
}

# private memory of its process, 0 where that cannot be known
sub resident
{
	open(my $status, '<', "/proc/$psql->{pid}/status") or return 0;
	my ($kb) = join('', <$status>) =~ /^RssAnon:\s+(\d+) kB/m;
	close $status;
	return ($kb || 0) * 1024;
}

# $n claims, in transactions of $per_transaction; each is finished and asked
# for once more.  A session of the tests gives each query a certain time, so
# none makes very many.
my $series = 0;

sub claim
{
	my ($n, $per_transaction) = @_;

	for (; $n > 5000; $n -= 5000)
	{
		claim(5000, $per_transaction);
	}
	$series++;
	$psql->query(qq(
DO \$\$
DECLARE c idem_claim; k text; started int := 0; replayed int := 0;
BEGIN
	FOR i IN 1 .. $n LOOP
		k := '$series-' || i;
		c := idem_begin(k, 'r', '\\x01');
		started := started + c.proceed::int;
		PERFORM idem_finish(k, '{"id": 1}');
		c := idem_begin(k, 'r', '\\x01');
		replayed := replayed + (c.outcome = 'replayed')::int;
		IF i % $per_transaction = 0 THEN
			COMMIT;
		END IF;
	END LOOP;
	ASSERT started = $n AND replayed = $n;
END\$\$;));
	return;
}

sub is_flat
{
	my ($what, $work) = @_;

	my ($accounted, $resident) = (accounted(), resident());
	$work->();
	cmp_ok(accounted() - $accounted, '<', 100_000,
		"$what: memory contexts do not grow");
	# eight bytes a claim, and some for what the allocator keeps
	cmp_ok(resident() - $resident, '<', 2_000_000 + 8 * $claims,
		"$what: nor does the process");
	return;
}

# caches fill up, the allocator finds its level
claim(5000, 100);
claim(5000, 1);

is_flat('one claim a transaction', sub { claim($claims / 10, 1) });
is_flat('a thousand claims a transaction',
	sub { claim($claims * 4 / 10, 1000) });
# While one statement makes many claims nothing may pile up until its end.
my $half = $claims * 5 / 10;
is_flat(
	'one statement',
	sub {
		my ($started, $growth) = split /\|/, $psql->query(qq(
SELECT count(*) FILTER (WHERE (c).proceed),
	max(m) FILTER (WHERE i = $half) - max(m) FILTER (WHERE i = 1000)
FROM (SELECT i, c, CASE WHEN i IN (1000, $half) THEN
		(SELECT sum(total_bytes) FROM pg_backend_memory_contexts
		 WHERE i IS NOT NULL) END AS m
	FROM (SELECT i, idem_begin('s' || i, 'r', '\\x01') AS c
		FROM generate_series(1, $half) i OFFSET 0) b) s;));
		is($started, $half, 'one statement with many claims');
		cmp_ok($growth, '<', 100_000, 'one statement: nothing piles up');
	});

# Within one transaction too, nothing may pile up until its end.  (But what the
# server keeps of every row that a transaction has written twice.)
my $counted = 'SELECT sum(total_bytes) FROM pg_backend_memory_contexts'
  . " WHERE name NOT IN ('Combo CIDs', 'TopTransactionContext')";
my $inside = $psql->query(qq(
BEGIN;
SELECT idem_begin('first', 'r', NULL) IS NULL;
$counted;
DO \$\$
BEGIN
	FOR i IN 1 .. 20000 LOOP
		PERFORM idem_begin('t' || i, 'r', NULL);
		PERFORM idem_finish('t' || i, '1');
		PERFORM idem_lookup('t' || i, 'r');
	END LOOP;
END\$\$;
$counted;
COMMIT;));
my (undef, $before, $after) = split /\n/, $inside;
cmp_ok($after - $before, '<', 100_000, 'one transaction: nothing piles up');

# ... nor with calls that fail
is_flat(
	'errors',
	sub {
		$psql->query(q(
DO $$
DECLARE failed int := 0;
BEGIN
	FOR i IN 1 .. 20000 LOOP
		BEGIN
			PERFORM idem_finish('never', '1');
		EXCEPTION WHEN SQLSTATE 'IK002' THEN
			failed := failed + 1;
		END;
	END LOOP;
	ASSERT failed = 20000;
END$$;));
	});
$psql->quit;

done_testing();
