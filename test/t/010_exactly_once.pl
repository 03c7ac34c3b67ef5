
# The main promise, under load: many connections hammer few keys, each key is
# done once, and every loser is told the winner's response.  And while one
# transaction holds a key, those who retry it are answered without waiting.

use strict;
use warnings;

use FindBin;
use lib $FindBin::RealBin;

use PgIdemTest;
use PostgreSQL::Test::Cluster;
use PostgreSQL::Test::Utils;
use Test::More;

my $node = new_node('exactly_once', "max_connections = 120\n");

$node->safe_psql('postgres', <<'EOS');
CREATE EXTENSION pg_idem;
CREATE TABLE charges (id bigint GENERATED ALWAYS AS IDENTITY, key text, client int);
CREATE TABLE answers (key text, outcome text, status int, response jsonb);
EOS

# ---- 64 connections, 100 keys, all three isolation levels

for my $level ('read committed', 'repeatable read', 'serializable')
{
	(my $tag = $level) =~ s/ .*//;

	$node->safe_psql('postgres', 'TRUNCATE charges, answers');
	hammer($node, "64 clients, 100 keys, $tag", <<"EOS",
\\set k random(1, 100)
BEGIN ISOLATION LEVEL $level;
SELECT outcome, proceed::int AS proceed, status, quote_nullable(response) AS response
FROM idem_begin('$tag-' || :k, 'POST /charges', idem_hash_text(:k::text)) \\gset
\\if :proceed
INSERT INTO charges (key, client) VALUES ('$tag-' || :k, :client_id);
SELECT idem_finish('$tag-' || :k, jsonb_build_object('client', :client_id), 201);
\\endif
COMMIT;
INSERT INTO answers VALUES ('$tag-' || :k, ':outcome', nullif(':status', '')::int, :response);
EOS
		'--client=64', '--transactions=40');

	is($node->safe_psql('postgres', 'SELECT count(*), count(DISTINCT key) FROM charges'),
		'100|100', "$level: 100 keys, 100 charges");
	is($node->safe_psql('postgres', "SELECT count(*) FROM answers WHERE outcome = 'started'"),
		'100', "$level: each was started once");
	is($node->safe_psql('postgres', "SELECT string_agg(DISTINCT outcome, ' ' ORDER BY outcome)
			FROM answers WHERE outcome <> 'in_progress'"),
		'replayed started', "$level: losers are told 'replayed' or 'in_progress'");
	is($node->safe_psql('postgres', "SELECT count(*) FROM answers a JOIN charges c USING (key)
			WHERE a.outcome = 'replayed'
			AND (a.status, a.response) IS DISTINCT FROM
				(201, jsonb_build_object('client', c.client))"),
		'0', "$level: every replay is the winner's response");
	is($node->safe_psql('postgres', "SELECT count(*) FROM idempotency_keys
			WHERE key LIKE '$tag-%' AND state = 'completed'"),
		'100', "$level: all keys are finished");
}

# ---- One transaction holds a key, 16 connections retry it

$node->safe_psql('postgres', <<'EOS');
TRUNCATE answers;
CREATE TABLE waits (event text);
BEGIN;
SELECT idem_begin('held', 'POST /charges', idem_hash_text('held'));
PREPARE TRANSACTION 'holder';
EOS

# Each retry also looks whether anyone, itself included, waits for a lock on
# a transaction or a row.
hammer($node, '16 clients, one key held', <<'EOS',
WITH c AS (SELECT * FROM idem_begin('held', 'POST /charges', idem_hash_text('held')))
INSERT INTO answers SELECT 'held', outcome, status, NULL FROM c;
INSERT INTO waits SELECT wait_event FROM pg_stat_activity
WHERE wait_event_type = 'Lock' AND wait_event IN ('transactionid', 'tuple', 'spectoken', 'virtualxid', 'advisory');
EOS
	'--client=16', '--transactions=50');

is($node->safe_psql('postgres', 'SELECT count(*), min(outcome), max(outcome), min(status) FROM answers'),
	'800|in_progress|in_progress|409', 'all retries are told "in_progress"');
is($node->safe_psql('postgres', 'SELECT count(*) FROM waits'),
	'0', 'and none of them was seen waiting for a lock');

$node->safe_psql('postgres', "ROLLBACK PREPARED 'holder'");
is($node->safe_psql('postgres', "SELECT outcome FROM idem_begin('held', 'POST /charges', idem_hash_text('held'))"),
	'started', 'when the holder has rolled back, the key is free');

$node->stop;
done_testing();
