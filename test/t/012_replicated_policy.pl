
# Policies may be kept on one server and replicated to others.  A change that
# logical replication applies must reach the sessions of the subscriber, like
# one that is made there; such changes fire row triggers only.

use strict;
use warnings;

use FindBin;
use lib $FindBin::RealBin;

use PgIdemTest;
use Test::More;

my $publisher = new_node('publisher', "wal_level = logical\n", allows_streaming => 'logical');
my $subscriber = new_node('subscriber', "wal_level = logical\n");

$_->safe_psql('postgres', 'CREATE EXTENSION pg_idem') foreach $publisher, $subscriber;
$publisher->safe_psql('postgres', 
	'CREATE PUBLICATION policies FOR TABLE idem_route_policies, idem_service_policies');
$subscriber->safe_psql('postgres',
	"CREATE SUBSCRIPTION policies CONNECTION '"
	  . $publisher->connstr
	  . " dbname=postgres' PUBLICATION policies");
ok( wait_until(
		sub {
			$subscriber->safe_psql('postgres',
				"SELECT count(*) FROM pg_subscription_rel WHERE srsubstate = 'r'") eq '2';
		}),
	'changes are streamed');

# Wait until the subscriber has so many policies in a table.
sub replicated
{
	my ($n, $table, $name) = @_;
	ok( wait_until(
			sub {
				$subscriber->safe_psql('postgres', "SELECT count(*) FROM $table") eq $n;
			}),
		$name);
	return;
}

my $session = PgIdemTest::Session->new($subscriber, 'postgres');
$session->query("SELECT idem_begin('k', 'r', NULL)");
$session->query("UPDATE idempotency_keys SET lease_until = '2000-01-01'");

$publisher->safe_psql('postgres',
	"INSERT INTO idem_route_policies (route, on_lost_lease) VALUES ('r', 'hold')");
replicated('1', 'idem_route_policies', 'the policy has been replicated');
is($session->query("SELECT outcome FROM idem_begin('k', 'r', NULL)"),
	'unknown', 'an open session of the subscriber goes by it');

$publisher->safe_psql('postgres', 'DELETE FROM idem_route_policies');
replicated('0', 'idem_route_policies', 'its end has been replicated');
is($session->query("SELECT outcome FROM idem_begin('k', 'r', NULL)"),
	'resumed', 'the session goes by that');

# ... and the policies of services
my $allow = "SELECT idem_breaker_allow('s')";
is($session->query($allow), 't', 'a breaker');
$publisher->safe_psql('postgres',
	"INSERT INTO idem_service_policies (service, breaker) VALUES ('s', 'forced_open')");
replicated('1', 'idem_service_policies', 'its policy has been replicated');
is($session->query($allow), 'f', 'an open session goes by it');
$publisher->safe_psql('postgres', 'TRUNCATE idem_service_policies');
replicated('0', 'idem_service_policies', 'its end has been replicated, by TRUNCATE');
is($session->query($allow), 't', 'the session goes by that');

$session->quit;
$subscriber->safe_psql('postgres', 'DROP SUBSCRIPTION policies');
$_->stop foreach $subscriber, $publisher;
done_testing();
