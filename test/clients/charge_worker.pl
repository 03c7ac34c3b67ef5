# charge_worker.pl: charge a card by a card network, exactly once
#
# The worked example of work that no transaction can hold: the card network
# is called between two transactions.  README.md tells it as a recipe.
#
#	charge_worker.pl ACCOUNT KEY REQUEST
#		serve POST /charges with this key and JSON body, sent by this account,
#		which is the tenant; prints outcome, status and answer
#	charge_worker.pl
#		take over claims whose workers are lost, and complete them, until there
#		are no more
#
# Connects to the database as psql does (PGHOST and so on) and to the card
# network at the URL in CARD_NETWORK (card_network.pl plays one).  Needs psql
# and Perl, pg_idem in the database, and
#
#	CREATE TABLE charges (id bigint GENERATED ALWAYS AS IDENTITY,
#		account text, key text, payment text, amount bigint);
#
# LEASE is an SQL interval, and CALL_SECONDS how long the card network may take.
# The tests let it die: DIE_AT names the place, and DIE_BY the signal that it
# sends itself there.
#
# Copyright (c) 2026, pg_idem contributors

use strict;
use warnings FATAL => 'all';

use HTTP::Tiny;
use IPC::Open2;
use JSON::PP;

use constant ROUTE => 'POST /charges';

# Longer than the call may take: a claim is taken over only once its worker
# has been silent for this long.
use constant LEASE => $ENV{LEASE} || '2 min';
use constant CALL_SECONDS => $ENV{CALL_SECONDS} || 60;

# ---------------------------------------------------------------------
# The request
# ---------------------------------------------------------------------

sub serve_request
{
	my ($account, $key, $request) = @_;

	# Transaction 1: the claim.  Whoever takes it over has nothing but what
	# is in it, so the request goes in too.
	sql('BEGIN');
	my $claim = row("SELECT * FROM idem_begin(:key, :route,
			idem_hash(:request::jsonb), tenant => :tenant, lease => :lease)",
		key => $key, route => ROUTE, request => $request, tenant => $account,
		lease => LEASE);
	if ($claim->{outcome} eq 'started')
	{
		$claim->{step} = 'received';
		$claim->{step_data} = { request => decode_json($request) };
		checkpoint($account, $key, $claim);
	}
	sql('COMMIT');

	# "started" or "resumed": do the work.  Otherwise here is the answer.
	@{$claim}{qw(status response)} = complete($account, $key, $claim)
	  if $claim->{proceed};
	return $claim;
}

# Do what is left of the work of a claim.  Returns status and response.
sub complete
{
	my ($account, $key, $claim) = @_;
	my $done = $claim->{step_data};

	die_if('before the call');
	if ($claim->{step} ne 'charged')
	{
		# No transaction is open.  The child key is the same on every attempt,
		# so the network charges once however often it is asked.
		@{$done}{qw(status payment)} =
		  pay(row('SELECT idem_child_key(:key, :step, :route, :tenant) AS child_key',
				key => $key, step => 'charge', route => ROUTE,
				tenant => $account)->{child_key},
			$done->{request});
		die_if('after the call');

		# Record the outside effect at once, and renew the lease.
		$claim->{step} = 'charged';
		checkpoint($account, $key, $claim);
		die_if('after the checkpoint');
	}

	# Transaction 2: the business rows and the answer.  If this worker has
	# lost its claim meanwhile, idem_finish fails, and the charge with it.
	my ($status, $response) = ($done->{status}, $done->{payment});
	sql('BEGIN');
	$response = row('INSERT INTO charges (account, key, payment, amount)
			VALUES (:account, :key, :payment, :amount)
			RETURNING id, payment, amount',
		account => $account, key => $key, payment => $done->{payment}{id},
		amount => $done->{request}{amount})
	  if $status == 201;
	sql('SELECT idem_finish(:key, :response, :status, route => :route,
			tenant => :tenant, attempt => :attempt)',
		key => $key, response => encode_json($response), status => $status,
		route => ROUTE, tenant => $account, attempt => $claim->{attempt});
	die_if('before the commit');
	sql('COMMIT');
	die_if('after the finish');
	return ($status, $response);
}

sub checkpoint
{
	my ($account, $key, $claim) = @_;

	sql('SELECT idem_checkpoint(:key, :step, :data, route => :route,
			tenant => :tenant, attempt => :attempt, lease => :lease)',
		key => $key, step => $claim->{step},
		data => encode_json($claim->{step_data}), lease => LEASE,
		route => ROUTE, tenant => $account, attempt => $claim->{attempt});
	return;
}

# ---------------------------------------------------------------------
# The completer
# ---------------------------------------------------------------------

# One claim at a time, so that its lease begins when the work does.
sub complete_unfinished
{
	while (my $claim = row('SELECT * FROM idem_resume(1, :route, lease => :lease)',
			route => ROUTE, lease => LEASE))
	{
		complete($claim->{tenant}, $claim->{key}, $claim);
	}
	return;
}

# ---------------------------------------------------------------------
# The card network
# ---------------------------------------------------------------------

# Returns status and answer.  Dies where it cannot tell what has become of the
# payment: the claim then stays as it is, and its lease decides when somebody
# asks again.
sub pay
{
	my ($child_key, $request) = @_;
	my $http = HTTP::Tiny->new(timeout => CALL_SECONDS, proxy => undef,
		http_proxy => undef);

	my $answer = $http->post("$ENV{CARD_NETWORK}/payments", {
		headers => { 'Idempotency-Key' => $child_key },
		content => JSON::PP->new->canonical->encode($request) });

	die "no answer from the card network\n"
	  unless $answer->{status} =~ /^(?:201|402)$/;
	return (0 + $answer->{status}, decode_json($answer->{content}));
}

# ---------------------------------------------------------------------
# The database: a psql that stays open, as any driver's connection would
# ---------------------------------------------------------------------

my ($from, $to);

# Run a statement with values for its :names.  Returns its rows, a line each.
# An error is the end of psql, and so of us.
sub sql
{
	my ($statement, %value) = @_;
	my @rows;

	open2($from, $to, qw(psql -XAtq -v ON_ERROR_STOP=1)) unless $to;
	$statement =~ s/(?<!:):([a-z]+)/quoted($value{$1})/ge;
	print $to "$statement;\n\\echo done\n";
	$to->flush;
	while (defined(my $line = <$from>))
	{
		return @rows if $line eq "done\n";
		push @rows, $line;
	}
	die "the database said no\n";
}

# The first row of a query, or undef
sub row
{
	my ($query, @values) = @_;
	my ($row) = sql("WITH q AS ($query) SELECT to_jsonb(q) FROM q", @values);

	return $row && decode_json($row);
}

sub quoted
{
	my ($value) = @_;

	return 'NULL' unless defined $value;
	$value =~ s/'/''/g;
	return "'$value'";
}

# ---------------------------------------------------------------------

# Die here, if that is the place; DIE_BY=STOP only looks like it.
sub die_if
{
	my ($here) = @_;

	kill $ENV{DIE_BY} || 'KILL', $$ if ($ENV{DIE_AT} || '') eq $here;
	return;
}

# a server that is gone is told by what it does not answer
$SIG{PIPE} = 'IGNORE';

if (@ARGV)
{
	my $claim = serve_request(@ARGV);

	print join(' ', $claim->{outcome}, $claim->{status},
		JSON::PP->new->canonical->encode($claim->{response} || {})), "\n";
}
else
{
	complete_unfinished();
}
