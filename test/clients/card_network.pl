# card_network.pl: a card network to pay by, over HTTP on the loopback
#
# It stands for whatever a request has to call outside the database.  Like
# the real ones it is idempotent by itself: a payment that comes again under
# the same Idempotency-Key is answered as it was the first time, and no money
# moves.  Unlike them it can be told to fail.
#
#	POST /payments		pay; the body is {"amount": n, "card": "..."}
#	GET /payments		what has been paid, and how often it was asked to
#	POST /cut/before	cut the connection of the next payment before it is made
#	POST /cut/after		... after it is made, but before it is answered
#
# A card whose number begins with 4000 is declined.
#
# Prints its address as its first line, and ends when its standard input
# does, so that it does not outlive who started it.
#
# Copyright (c) 2026, pg_idem contributors

use strict;
use warnings FATAL => 'all';

use IO::Select;
use IO::Socket::INET;
use JSON::PP;

# Whoever connects must say what he wants within this.
use constant REQUEST_SECONDS => 60;

my $json = JSON::PP->new->canonical;

my @payments;    # made, in order
my %answers;     # by Idempotency-Key: what was asked, and the answer
my $asked = 0;   # how many times POST /payments came
my $cut = '';    # the next payment: "before", "after"

# ---------------------------------------------------------------------
# Payments
# ---------------------------------------------------------------------

# Returns status and body.
sub pay
{
	my ($key, $body) = @_;
	my $order = eval { $json->decode($body) };

	return (400, { error => 'an Idempotency-Key and a JSON body, please' })
	  unless defined $key && ref $order eq 'HASH';

	my $before = $answers{$key};
	return (422, { error => 'another payment has this key' })
	  if $before && $before->{body} ne $body;

	$before ||= $answers{$key} =
	  { body => $body, answer => [ new_payment($key, $order) ] };
	return @{ $before->{answer} };
}

sub new_payment
{
	my ($key, $order) = @_;

	return (402, { error => 'card declined' })
	  if $order->{card} =~ /^4000/;

	push @payments,
	  { id => 'pay_' . (@payments + 1), key => $key, amount => $order->{amount} };
	return (201, { id => $payments[-1]{id}, amount => $order->{amount} });
}

# Returns status and body; nothing if the connection is to be cut.
sub answer
{
	my ($method, $path, $headers, $body) = @_;

	if ("$method $path" eq 'POST /payments')
	{
		my $this_cut = $cut;

		$cut = '';
		$asked++;
		return if $this_cut eq 'before';
		my @answer = pay($headers->{'idempotency-key'}, $body);
		return $this_cut eq 'after' ? () : @answer;
	}
	return (200, { asked => $asked, payments => \@payments })
	  if "$method $path" eq 'GET /payments';
	if ("$method $path" =~ m{^POST /cut/(before|after)$})
	{
		$cut = $1;
		return (200, {});
	}
	return (404, { error => 'no such thing' });
}

# ---------------------------------------------------------------------
# HTTP, as much of it as is needed
# ---------------------------------------------------------------------

# Returns method, path, headers and body; nothing if the client went away.
sub read_request
{
	my ($client) = @_;
	my ($length, %headers) = (0);

	my $line = <$client>;
	return unless defined $line && $line =~ m{^(\S+) (\S+) HTTP/1};
	my ($method, $path) = ($1, $2);

	while (defined($line = <$client>) && $line =~ /^([^:\s]+):\s*(.*?)\s*$/)
	{
		$headers{ lc $1 } = $2;
	}
	$length = $headers{'content-length'} || 0;
	my $got = read($client, my $body, $length);
	return unless defined $got && $got == $length;
	return ($method, $path, \%headers, $body);
}

sub serve
{
	my ($client) = @_;

	my @request = read_request($client) or return;
	my ($status, $body) = answer(@request) or return;

	$body = $json->encode($body);
	print $client "HTTP/1.1 $status Status\r\n",
	  "Content-Type: application/json\r\n",
	  'Content-Length: ', length $body, "\r\n",
	  "Connection: close\r\n\r\n", $body;
}

# a client may be dead by the time that it is answered
$SIG{PIPE} = 'IGNORE';
$SIG{ALRM} = sub { die "no request came\n" };

my $listener = IO::Socket::INET->new(
	LocalAddr => '127.0.0.1', LocalPort => 0, Listen => 10)
  or die "cannot listen: $@\n";
$| = 1;
print 'http://127.0.0.1:', $listener->sockport, "\n";

my $select = IO::Select->new($listener, \*STDIN);
for (;;)
{
	my @ready = $select->can_read;

	last if grep { $_ == \*STDIN } @ready;
	my $client = $listener->accept or next;
	eval {
		alarm REQUEST_SECONDS;
		serve($client);
	};
	alarm 0;
	close $client;
}
