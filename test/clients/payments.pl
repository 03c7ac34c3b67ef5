# payments.pl: one connection of the payment service that "make demo" tries
#
# POST /charges, written twice: as it is often written by hand, and with
# pg_idem.  Both get the same key and JSON body, take the same time to ask
# the card network, and answer [ HTTP status, JSON, was it a replay ].
#
# Copyright (c) 2026, pg_idem contributors

package Payments;

use strict;
use warnings FATAL => 'all';

use DBI;
use JSON::PP;
use Time::HiRes qw(sleep time);

# How long the card network takes to answer; what a request does apart from
# the database, and where most of its life is spent.
use constant CARD_NETWORK_SECONDS => 0.004;

# A server that recovers from a crash must be back within this.
use constant CONNECT_SECONDS => 180;

my %handlers = (naive => \&naive, pg_idem => \&pg_idem);

# ---------------------------------------------------------------------
# The two handlers
# ---------------------------------------------------------------------

# Look the key up, mark it as busy, charge, store the answer.  Each statement
# commits on its own, and nothing but the look-up keeps a key unique: what
# "get or create" of an object mapper comes to without a unique index.
sub naive
{
	my ($db, $key, $body, $cut) = @_;

	my $seen = row($db,
		'SELECT response FROM naive_keys WHERE key = ? LIMIT 1', $key);
	return [ 409, undef, 0 ] if $seen && !defined $seen->{response};
	return [ 201, $seen->{response}, 1 ] if $seen;

	run($db, 'INSERT INTO naive_keys (key) VALUES (?)', $key);
	cut($db, $cut, 'claimed');

	my $response = charge($db, $key, $body);
	cut($db, $cut, 'charged');

	run($db, 'UPDATE naive_keys SET response = ? WHERE key = ?',
		$response, $key);
	cut($db, $cut, 'stored');
	return [ 201, $response, 0 ];
}

# Claim the key, charge, store the answer: one transaction.  The tenant is the
# account that has sent the request; here each card has one of its own.
sub pg_idem
{
	my ($db, $key, $body, $cut) = @_;
	my $account = decode_json($body)->{card};

	$db->begin_work;
	my $claim = row($db,
		q{SELECT * FROM idem_begin(?, 'POST /charges', idem_hash(?::jsonb),
			tenant => ?)},
		$key, $body, $account);
	if (!$claim->{proceed})
	{
		$db->commit;
		return [
			$claim->{status}, $claim->{response},
			$claim->{outcome} eq 'replayed' ? 1 : 0 ];
	}
	cut($db, $cut, 'claimed');

	my $response = charge($db, $key, $body);
	cut($db, $cut, 'charged');

	run($db, 'SELECT idem_finish(?, ?::jsonb, status => 201, tenant => ?)',
		$key, $response, $account);
	cut($db, $cut, 'stored');
	$db->commit;
	return [ 201, $response, 0 ];
}

# The business work.  Returns the answer's JSON.
sub charge
{
	my ($db, $key, $body) = @_;

	sleep(CARD_NETWORK_SECONDS);
	return row($db, q{
		INSERT INTO charges (payment, amount, currency, card)
		SELECT ?, r.*
		FROM jsonb_to_record(?::jsonb)
			AS r(amount bigint, currency text, card text)
		RETURNING jsonb_build_object('charge', id, 'amount', amount,
			'currency', currency) AS response}, $key, $body)->{response};
}

# The end of a request whose fate it is to be killed here: another connection
# terminates its backend, and waits until that has gone.
sub cut
{
	my ($db, $cut, $here) = @_;
	return unless defined $cut && $cut eq $here;

	my $other = connect_to($db->{private_demo_dsn});
	my ($gone) = $other->selectrow_array(
		'SELECT pg_terminate_backend(?, 180000)', undef, $db->{pg_pid});
	$other->disconnect;
	die "could not terminate a backend\n" unless $gone;
	die "cut at \"$here\"\n";
}

# ---------------------------------------------------------------------
# The connection
# ---------------------------------------------------------------------

# Run a statement.
sub run
{
	my ($db, $sql, @parameters) = @_;

	$db->do($sql, undef, @parameters);
}

# The one row of a query, or undef
sub row
{
	my ($db, $sql, @parameters) = @_;

	return $db->selectrow_hashref($sql, undef, @parameters);
}

# Connect.  A server that is down or recovering is asked again until it is
# back: the connection attempt itself is the condition that is waited for.
sub connect_to
{
	my ($dsn) = @_;
	my $deadline = time + CONNECT_SECONDS;

	for (;;)
	{
		my $db = DBI->connect($dsn, 'postgres', '',
			{ RaiseError => 0, PrintError => 0, PrintWarn => 0,
			  AutoCommit => 1, AutoInactiveDestroy => 1,
			  pg_server_prepare => 0 });
		if ($db)
		{
			$db->{RaiseError} = 1;
			$db->{private_demo_dsn} = $dsn;
			return $db;
		}
		die "cannot connect: $DBI::errstr\n" if time > $deadline;
		sleep(0.05);
	}
}

# Serve one request.  Returns { answer }, or { lost } if the connection went
# away under it, or { error }.
sub serve_one
{
	my ($db, $handler, $request) = @_;

	my $answer = eval {
		$handlers{$handler}->($db, @{$request}{qw(key body cut)});
	};
	return { answer => $answer } if $answer;

	my $error = $@;
	eval {
		$db->rollback unless $db->{AutoCommit};
		1;
	} && $db->ping && return { error => $error };

	# nothing more can be said to the server, so do not complain that it fails
	$db->{RaiseError} = 0;
	$db->disconnect;
	return { lost => $error };
}

# Serve requests, a JSON object a line, until the other side hangs up.
sub serve
{
	my ($dsn, $handler, $socket) = @_;
	my $json = JSON::PP->new->canonical;
	my $db = connect_to($dsn);

	while (defined(my $line = <$socket>))
	{
		$db ||= connect_to($dsn);
		my $result = serve_one($db, $handler, $json->decode($line));
		undef $db if exists $result->{lost};
		print $socket $json->encode($result), "\n";
	}
	$db->disconnect if $db;
}

1;
