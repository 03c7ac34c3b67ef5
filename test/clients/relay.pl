# relay.pl: deliver the messages of a topic, at least once each
#
# The worked example of a relay, and of a consumer on the other side that
# makes "at least once" into "exactly once".  README.md tells it as a recipe.
#
#	relay.pl TOPIC		deliver until told to stop (SIGTERM)
#
# Connects to the database as psql does (PGHOST and so on), and to that of the
# consumer, CONSUMER_DB; both have pg_idem, and that of the consumer
#
#	CREATE TABLE effects (message_id uuid, group_key text);
#
# Needs DBD::Pg.  LEASE and RETRY_AFTER are SQL intervals.
#
# The tests let it die: DIE_AT names the place.
#
# Copyright (c) 2026, pg_idem contributors

use strict;
use warnings FATAL => 'all';

use DBI;
use IO::Select;
use JSON::PP;

my ($topic) = @ARGV;

# Messages taken at a time.  The lease is for all of them, so it must be longer
# than it takes to deliver them all.
use constant BATCH => 10;
my $lease = $ENV{LEASE} || '1 min';

# What nobody gives notice of: a backoff, a delay or a lease is over.
use constant POLL_SECONDS => 1;

my $stop = 0;
local $SIG{TERM} = sub { $stop = 1 };

my $db = connect_to($ENV{PGDATABASE});
my $consumer_db = connect_to($ENV{CONSUMER_DB});

# ---------------------------------------------------------------------
# The relay
# ---------------------------------------------------------------------

# Listen first, then look: what is published after the look wakes us.
$db->do('LISTEN idem_outbox');
until ($stop)
{
	wait_for_news() unless deliver_batch();
}

# Take some messages and deliver them.  Returns how many.  No transaction is
# open but while a statement runs.
sub deliver_batch
{
	my $messages = $db->selectall_arrayref(
		'SELECT * FROM idem_outbox_take(?, ?, ?)',
		{ Slice => {} }, $topic, BATCH, $lease);

	die_if('after the take') if @$messages;
	foreach my $message (@$messages)
	{
		if (eval { consume($message); 1 })
		{
			die_if('after the delivery');
			answer('SELECT idem_outbox_done(?, ?)', $message);
			die_if('after the done');
		}
		else
		{
			my $error = $@ =~ s/\s+\z//r;

			$consumer_db->rollback unless $consumer_db->{AutoCommit};
			# a refusal is for good; anything else may be better next time
			answer('SELECT idem_outbox_fail(?, ?, ?, ?, ?)',
				$message, $error, $ENV{RETRY_AFTER}, $error =~ /^refused/ ? 1 : 0);
		}
	}
	return scalar @$messages;
}

# Tell what became of a message.  If we were too slow, another relay has it
# by now (IK001) or has done with it (IK002): then it is not our business any
# more.  Our delivery may have been the second; the consumer can tell.
sub answer
{
	my ($call, $message, @values) = @_;

	return
	  if eval { $db->do($call, undef, @{$message}{qw(id attempt)}, @values) };
	die $@ unless ($db->state || '') =~ /^IK00[12]$/;
	return;
}

# Sleep until something is published, or it is time to look anyway.
sub wait_for_news
{
	IO::Select->new($db->{pg_socket})->can_read(POLL_SECONDS);
	1 while $db->pg_notifies;
	return;
}

# ---------------------------------------------------------------------
# The consumer: another service, with a database of its own
# ---------------------------------------------------------------------

# Its effect, and that it has had it, are one transaction.  Dies where it has
# not had its effect, or cannot tell.
sub consume
{
	my ($message) = @_;

	$consumer_db->begin_work;
	if (is_new($message->{message_id}))
	{
		have_effect($message);
		die_if('during the delivery');
	}
	$consumer_db->commit;
	return;
}

# Is this the first time that the message comes?
sub is_new
{
	my ($message_id) = @_;

	# another delivery may be at it: 55P03, and this one fails
	return ($consumer_db->selectrow_array(
		q(SELECT idem_receive('relay', ?)), undef, $message_id))[0];
}

# What messages of the tests can do: kill whoever delivers them, be refused,
# fail always, fail sometimes.
sub have_effect
{
	my ($message) = @_;
	my $payload = JSON::PP->new->utf8->allow_nonref->decode($message->{payload} // 'null');
	my $trouble = ref $payload eq 'HASH' && $payload->{trouble} || '';

	kill 'KILL', $$ if $trouble eq 'kills';
	die "refused: no such customer\n" if $trouble eq 'refused';
	die "cannot be delivered\n" if $trouble eq 'fails';
	die "not now\n" if $trouble eq 'sometimes' && rand() < 0.5;
	$consumer_db->do(
		'INSERT INTO effects (message_id, group_key) VALUES (?, ?)',
		undef, @{$message}{qw(message_id group_key)});
	return;
}

# ---------------------------------------------------------------------

sub connect_to
{
	my ($database) = @_;

	return DBI->connect("dbi:Pg:dbname=$database", undef, undef,
		{ AutoCommit => 1, RaiseError => 1, PrintError => 0 });
}

# Die here, if that is the place
sub die_if
{
	my ($here) = @_;

	kill 'KILL', $$ if ($ENV{DIE_AT} || '') eq $here;
	return;
}
