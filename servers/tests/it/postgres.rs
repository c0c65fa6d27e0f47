//! PostgreSQL and PgBouncer.

use std::os::unix::process::CommandExt;
use std::process::Command;
use std::time::{Duration, Instant};

use postrider_servers::pgbouncer::PgBouncer;
use postrider_servers::postgres::{self, Options, Shutdown, Version};
use rustix::process::{Pid, Signal, kill_process_group};

/// A process that ended and that nobody has waited for does not run.
fn is_running(pid: u32) -> bool {
    let state = std::fs::read_to_string(format!("/proc/{pid}/stat"));
    state.is_ok_and(|state| !state.contains(") Z "))
}

#[test]
fn every_version_starts_and_answers_and_leaves_nothing() {
    for version in Version::ALL {
        let started = Instant::now();
        let server = Options::new(version).launch().unwrap();
        println!("{version:?} from nothing: {:?}", started.elapsed());
        let (pid, folder) = (server.pid().unwrap(), server.data().parent().unwrap().to_owned());
        let started = Instant::now();
        let database = server.create_database().unwrap();
        println!("{version:?} fresh database: {:?}", started.elapsed());
        let answer = database.psql("select current_setting('server_version_num')").unwrap();
        assert!(answer.starts_with(&version.major().to_string()), "{answer}");
        let settings = "select current_setting('wal_level'), current_setting('fsync')";
        assert_eq!(database.psql(settings).unwrap(), "logical|off");
        drop((database, server));
        assert!(!is_running(pid) && !folder.exists());
    }
}

#[test]
fn data_outlives_every_kind_of_end() {
    let server = Options::new(Version::V15).durable().launch().unwrap();
    let port = server.port();
    assert!(server.data().starts_with(std::env::temp_dir()));
    assert_eq!(server.psql("postgres", "select current_setting('fsync')").unwrap(), "on");
    let database = server.create_database().unwrap();
    database.psql("create table t (x int)").unwrap();
    let end: [(&str, &dyn Fn()); 3] = [
        ("fast", &|| server.restart(Shutdown::Fast).unwrap()),
        ("immediate", &|| server.restart(Shutdown::Immediate).unwrap()),
        ("kill", &|| {
            server.kill().unwrap();
            assert!(database.psql("select 1").is_err());
            server.start().unwrap();
        }),
    ];
    for (index, (name, end)) in end.iter().enumerate() {
        let before = server.pid();
        database.psql("insert into t values (1)").unwrap();
        end();
        assert_ne!(server.pid(), before, "{name}");
        let rows = database.psql("select count(*) from t").unwrap();
        assert_eq!(rows, (index + 1).to_string(), "{name}");
    }
    assert_eq!(server.port(), port);
    assert!(server.log_tail().contains("ready to accept connections"));
}

#[test]
fn a_kill_ends_every_process_and_the_drop_removes_the_shared_memory() {
    let server = Options::new(Version::V15).launch().unwrap();
    let pid = server.pid().unwrap();
    let mut session = Command::new(Version::V15.program("psql").unwrap())
        .args(["-d", &server.url("postgres", "postgres"), "-c", "select pg_sleep(60)"])
        .spawn()
        .unwrap();
    let backends = "select count(*) from pg_stat_activity where query like '%pg_sleep(60)%' \
        and pid <> pg_backend_pid()";
    while server.psql("postgres", backends).unwrap() != "1" {}
    let shell = |script: &str| Command::new("sh").args(["-c", script]).output().unwrap().stdout;
    let children = String::from_utf8(shell(&format!("pgrep -P {pid}"))).unwrap();
    let children: Vec<u32> = children.lines().map(|line| line.parse().unwrap()).collect();
    assert!(children.len() > 3 && children.iter().all(|child| is_running(*child)));
    let lock_file = std::fs::read_to_string(server.data().join("postmaster.pid")).unwrap();
    let segment = lock_file.lines().nth(6).unwrap().split_whitespace().nth(1).unwrap().to_owned();
    // Left behind is one that nobody is attached to; another server may get the same number.
    let left = format!("ipcs -m | awk '$2 == {segment} && $6 == 0' | wc -l");
    server.kill().unwrap();
    assert_eq!(shell(&left), b"1\n");
    assert!(!is_running(pid) && !children.iter().any(|child| is_running(*child)));
    assert!(!session.wait().unwrap().success(), "the session is cut");
    drop(server);
    assert_eq!(shell(&left), b"0\n");
}

#[test]
fn copies_live_on_their_own() {
    let server = Options::new(Version::V15).launch().unwrap();
    server.psql("postgres", "create table t (x int)").unwrap();
    let standby = server.standby().unwrap();
    let restored = server.restored_backup().unwrap();
    assert_eq!(standby.psql("postgres", "select pg_is_in_recovery()").unwrap(), "t");
    assert_eq!(restored.psql("postgres", "select pg_is_in_recovery()").unwrap(), "f");
    assert!(standby.psql("postgres", "insert into t values (1)").is_err());
    server.kill().unwrap();
    standby.promote().unwrap();
    let copied = server.copied_files().unwrap();
    for copy in [&standby, &restored, &copied] {
        copy.psql("postgres", "insert into t values (1)").unwrap();
        assert_eq!(copy.psql("postgres", "select count(*) from t").unwrap(), "1");
    }
    let timeline = "select timeline_id from pg_control_checkpoint()";
    standby.psql("postgres", "checkpoint").unwrap();
    assert_eq!(standby.psql("postgres", timeline).unwrap(), "2");
    assert_eq!(restored.psql("postgres", timeline).unwrap(), "1");
    server.start().unwrap();
    assert_eq!(server.psql("postgres", "select count(*) from t").unwrap(), "0");
    assert!(server.copied_files().is_err(), "the server runs");
}

#[test]
fn a_password_and_a_certificate_are_asked_for_and_given() {
    let server = Options::new(Version::V15).password("s3cret").tls().launch().unwrap();
    let database = server.create_database().unwrap();
    let psql = |url: &str| {
        let mut command = Command::new(Version::V15.program("psql").unwrap());
        let sql = "select ssl from pg_stat_ssl where pid = pg_backend_pid()";
        command.args(["-X", "-A", "-t", "-w", "-d", url, "-c", sql]);
        command.output().unwrap()
    };
    let wrong = server.url("postgres", "postgres").replace("s3cret", "guess");
    assert!(!psql(&wrong).status.success());
    let authority = server.certificate_authority().unwrap();
    let verified = |host: &str| {
        let url = database.url().replace("127.0.0.1", host);
        format!("{url}?sslmode=verify-full&sslrootcert={}", authority.display())
    };
    for host in ["127.0.0.1", "localhost"] {
        let answer = psql(&verified(host));
        assert_eq!(String::from_utf8_lossy(&answer.stdout), "t\n", "{answer:?}");
    }
    let other = Options::new(Version::V15).tls().launch().unwrap();
    let foreign = other.certificate_authority().unwrap();
    let url = format!("{}?sslmode=verify-full&sslrootcert={}", database.url(), foreign.display());
    assert!(!psql(&url).status.success(), "another server's authority");
}

/// How far a test process gets before it is killed.
#[derive(Clone, Copy, PartialEq)]
enum Moment {
    FolderMade,
    Initialising,
    ServerReady,
}

#[test]
fn a_killed_test_process_leaves_nothing() {
    for moment in [Moment::FolderMade, Moment::Initialising, Moment::ServerReady] {
        let place = tempfile::tempdir().unwrap();
        // The servers' user has to get in.
        let open = std::os::unix::fs::PermissionsExt::from_mode(0o755);
        std::fs::set_permissions(place.path(), open).unwrap();
        let folders = || -> Vec<_> {
            std::fs::read_dir(place.path()).unwrap().flatten().map(|entry| entry.path()).collect()
        };
        let mut victim = Command::new(std::env::current_exe().unwrap())
            .args(["--exact", "postgres::data_outlives_every_kind_of_end"])
            .env("TMPDIR", place.path())
            .process_group(0)
            .stdout(std::process::Stdio::null())
            .spawn()
            .unwrap();
        let postmaster = loop {
            assert!(victim.try_wait().unwrap().is_none(), "it ended before it could be killed");
            let Some(folder) = folders().pop() else { continue };
            let made = match moment {
                Moment::FolderMade => true,
                Moment::Initialising => folder.join("data/base/1").exists(),
                Moment::ServerReady => false,
            };
            if made {
                break None;
            }
            let lines = std::fs::read_to_string(folder.join("data/postmaster.pid"));
            let lines = lines.unwrap_or_default();
            if lines.contains("ready") {
                break Some(lines.lines().next().unwrap().parse().unwrap());
            }
        };
        // The whole group, as test runners end a test that hangs.
        let group = Pid::from_raw(i32::try_from(victim.id()).unwrap()).unwrap();
        kill_process_group(group, Signal::KILL).unwrap();
        victim.wait().unwrap();
        let deadline = Instant::now() + Duration::from_secs(20);
        while !folders().is_empty() || postmaster.is_some_and(is_running) {
            assert!(Instant::now() < deadline, "{postmaster:?} {:?}", folders());
            std::thread::sleep(Duration::from_millis(10));
        }
        let named = format!("pgrep -f {}", place.path().display());
        let left = Command::new("sh").args(["-c", &named]).output().unwrap().stdout;
        // The shell that searches finds itself at most.
        assert!(String::from_utf8_lossy(&left).lines().count() <= 1, "{left:?}");
    }
}

#[test]
fn a_missing_program_is_an_error_with_its_remedy() {
    let victim = Command::new(std::env::current_exe().unwrap())
        .args(["--exact", "postgres::shared_databases_are_apart_and_dropped"])
        .env_remove(Version::V15.shared_variable())
        .env(Version::V15.programs_variable(), "/nowhere")
        .output()
        .unwrap();
    assert!(!victim.status.success());
    let output = String::from_utf8_lossy(&[victim.stdout, victim.stderr].concat()).into_owned();
    assert!(output.contains("Missing"), "{output}");
    let error = Version::V15.program("no-such-program").unwrap_err().to_string();
    assert!(error.contains("cargo xtask services install"), "{error}");
}

#[test]
fn the_environment_names_the_server_that_tests_share() {
    let server = Options::new(Version::V15).setting("log_statement = ddl").launch().unwrap();
    let test = Command::new(std::env::current_exe().unwrap())
        .args(["--exact", "postgres::shared_databases_are_apart_and_dropped"])
        .env(Version::V15.shared_variable(), server.url("postgres", "postgres"))
        .output()
        .unwrap();
    assert!(test.status.success(), "{test:?}");
    let log = server.log_tail();
    assert_eq!(log.matches("create database test_").count(), 2, "{log}");
    assert_eq!(server.psql("postgres", "select count(*) from pg_database").unwrap(), "3");
}

#[test]
fn shared_databases_are_apart_and_dropped() {
    let one = postgres::shared(Version::V15).unwrap();
    let other = postgres::shared(Version::V15).unwrap();
    one.psql("create table t ()").unwrap();
    assert!(other.psql("select * from t").is_err());
    let names = format!("select count(*) from pg_database where datname = '{}'", one.name());
    assert_eq!(other.psql(&names).unwrap(), "1");
    drop(one);
    assert_eq!(other.psql(&names).unwrap(), "0");
}

#[test]
fn pgbouncer_answers_and_is_gone_with_its_value() {
    let database = postgres::shared(Version::V15).unwrap();
    let bouncer = PgBouncer::start(&database.url(), &["default_pool_size = 1"]).unwrap();
    let url = bouncer.url(database.name());
    let psql = || {
        let mut command = Command::new(Version::V15.program("psql").unwrap());
        command.args(["-X", "-A", "-t", "-d", &url, "-c", "select current_database()"]);
        command.output().unwrap()
    };
    let answer = psql();
    let expected = format!("{}\n", database.name());
    assert_eq!(String::from_utf8_lossy(&answer.stdout), expected, "{answer:?}");
    drop(bouncer);
    assert!(!psql().status.success());
}
