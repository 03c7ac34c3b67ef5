
# What the TAP tests of pg_idem share: a node with the extension, sessions
# that stay open, and waiting for a condition with a bound.
#
# PostgreSQL::Test::Cluster has changed a good deal between 15 and 18
# (background_psql, wait_for_log, ...), so only what all of them have is used
# from it, and the rest is here.

package PgIdemTest;

use strict;
use warnings;

use Exporter 'import';
use IPC::Run;
use PostgreSQL::Test::Cluster;
use PostgreSQL::Test::Utils;
use Test::More;
use Time::HiRes qw(usleep);

our @EXPORT = qw(
  new_node
  wait_until
  log_end
  log_since
  wait_for_log_line
  sqlstate_is
  sqlstate_of
  launcher_pid
  expired_keys
  hammer
  in_one_window
);

my $scripts = 0;
my $bound = $PostgreSQL::Test::Utils::timeout_default || 180;

# A started node with pg_idem preloaded, a short naptime, and a lease that
# outlives the test on any machine; where one has to be over, it is set into
# the past.  Later lines of $conf win.
sub new_node
{
	my ($name, $conf, %init) = @_;
	my $node = PostgreSQL::Test::Cluster->new($name);

	$node->init(%init);
	$node->append_conf('postgresql.conf', <<EOC);
shared_preload_libraries = 'pg_idem'
pg_idem.expire_naptime = 1s
max_prepared_transactions = 10
pg_idem.lease = 1h
max_connections = 30
autovacuum = off
log_statement = none
EOC
	$node->append_conf('postgresql.conf', $conf) if defined $conf;
	$node->start;
	return $node;
}

# Call $test until it is true.  False if that takes too long.
sub wait_until
{
	my ($test) = @_;

	for (my $i = 0; $i < 20 * $bound; $i++)
	{
		return 1 if $test->();
		usleep(50_000);
	}
	return 0;
}

# The log of a node: where it ends now, and what has come since.
sub log_end
{
	my ($node) = @_;
	return -s $node->logfile || 0;
}

sub log_since
{
	my ($node, $offset) = @_;
	return substr(slurp_file($node->logfile), $offset || 0);
}

sub wait_for_log_line
{
	my ($node, $pattern, $offset) = @_;
	return wait_until(sub { log_since($node, $offset) =~ $pattern });
}

# SQLSTATE with which a script ends, '00000' if with none; and its message.
sub sqlstate_of
{
	my ($node, $db, $sql, $user) = @_;
	my ($rc, $out, $err) = $node->psql(
		$db,
		"\\set VERBOSITY verbose\n" . $sql,
		on_error_stop => 1,
		extra_params => [ '-U', $user || $ENV{PGUSER} || getpwuid($>) ]);

	return ('00000', $out) if $rc == 0;
	return ($1, $err) if $err =~ /(?:ERROR|FATAL):  ([0-9A-Z]{5}):/;
	return ('?????', $err);
}

sub sqlstate_is
{
	my ($node, $db, $user, $sql, $expected, $name) = @_;
	my ($state, $err) = sqlstate_of($node, $db, $sql, $user);

	local $Test::Builder::Level = $Test::Builder::Level + 1;
	is($state, $expected, $name) or diag($err);
	return $err;
}

# PID of the launcher, '' if there is none.
sub launcher_pid
{
	my ($node) = @_;
	return $node->safe_psql('postgres',
		"SELECT pid FROM pg_stat_activity WHERE backend_type = 'pg_idem launcher'"
	);
}

# SQL that makes finished keys past their retention, in the default store or
# another: 'a', or 'a*100' for a1, a2, ..., a100, the older ones first; or claims
# that are past everything, if $state is in_progress.
sub expired_keys
{
	my ($keys, $store, $state) = @_;
	my ($name, $n) = $keys =~ /^(.*)\*(\d+)$/ ? ("'$1' || i", $2) : ("'$keys'", 1);

	$store ||= 'idempotency_keys';
	$state ||= 'completed';
	return
	    "INSERT INTO $store (key, tenant, route, state, attempt,"
	  . " result_dropped, lease_until, created_at, expires_at)"
	  . " SELECT $name, '', 'r', '$state', 1, false, '2000-01-01',"
	  . " '2000-01-01', '2000-01-01'::timestamptz + i * interval '1 s'"
	  . " FROM generate_series(1, $n) i;";
}

# Run a pgbench script in many connections; any error in it fails.
sub hammer
{
	my ($node, $name, $script, @options) = @_;
	my $file = $node->basedir . '/pgbench' . ++$scripts . '.sql';

	append_to_file($file, $script);
	local $Test::Builder::Level = $Test::Builder::Level + 1;
	$node->command_checks_all(
		[
			'pgbench', '--no-vacuum', '--jobs=2', "--file=$file", @options,
			'postgres'
		],
		0,
		[qr/number of failed transactions: 0/],
		[qr/^(?!.*(ERROR|FATAL|aborted))/s],
		"$name: no client met an error");
	return;
}

# What a retry budget has counted leaves it after ten seconds.  Do something
# until it took less than that, which it says itself; it is told which time
# this is, for a name of its own, and of how much work it may do a part only,
# lest a slow machine never get through it in time.  Returns what else it
# returned.
sub in_one_window
{
	my ($test) = @_;

	foreach my $try (1 .. 20)
	{
		my ($fits, @result) = $test->($try, 0.5**($try - 1));

		return @result if $fits eq 't';
	}
	die 'too slow for the window of a retry budget';
}

#
# A psql that stays open: my $s = PgIdemTest::Session->new($node, 'postgres');
#
package PgIdemTest::Session;

sub new
{
	my ($class, $node, $db, $user) = @_;
	my $self = bless { in => '', out => '', err => '', n => 0 }, $class;
	my @cmd = (
		$node->installed_command('psql'), '-XAtq',
		'-v', 'VERBOSITY=verbose',
		'-d', $node->connstr($db));

	push @cmd, '-U', $user if defined $user;
	$self->{timer} = IPC::Run::timeout($bound);
	$self->{run} = IPC::Run::start(\@cmd, '<', \$self->{in},
		'>', \$self->{out}, '2>', \$self->{err}, $self->{timer});
	$self->{pid} = $self->query('SELECT pg_backend_pid()');
	return $self;
}

# Give it a script, and do not wait for the end of it.
sub start
{
	my ($self, $sql) = @_;

	$self->{out} = $self->{err} = '';
	$self->{n}++;
	$self->{in} .= "$sql\n;\n\\echo end:$self->{n}\n\\warn end:$self->{n}\n";
	$self->{timer}->start($bound);
	$self->{run}->pump_nb;
	return;
}

# Wait for the end of what was started.  Returns what it said; errors too are
# in $self->{err}.
sub result
{
	my ($self) = @_;
	my $end = qr/^end:$self->{n}\r?\n/m;

	until ($self->{out} =~ $end && $self->{err} =~ $end)
	{
		die "psql has gone: $self->{err}" unless $self->{run}->pumpable;
		$self->{run}->pump;
	}
	$self->{out} =~ s/$end//;
	$self->{err} =~ s/$end//;
	chomp $self->{out};
	return $self->{out};
}

# Has what was started ended?
sub is_done
{
	my ($self) = @_;
	$self->{run}->pump_nb;
	return $self->{err} =~ /^end:$self->{n}\r?\n/m;
}

# Run a script.  Dies of an error.
sub query
{
	my ($self, $sql) = @_;

	$self->start($sql);
	my $out = $self->result;
	die "$sql: $self->{err}" if $self->{err} =~ /(?:ERROR|FATAL):/;
	return $out;
}

# Run a script that fails.  Returns its SQLSTATE.
sub error
{
	my ($self, $sql) = @_;

	$self->start($sql);
	$self->result;
	return $self->{err} =~ /(?:ERROR|FATAL):  ([0-9A-Z]{5}):/ ? $1 : '00000';
}

sub quit
{
	my ($self) = @_;

	$self->{in} .= "\\q\n";
	$self->{timer}->start($bound);
	eval { $self->{run}->finish };
	return;
}

# For a session whose backend or server was killed.
sub abandon
{
	my ($self) = @_;

	eval { $self->{run}->kill_kill };
	return;
}

1;
