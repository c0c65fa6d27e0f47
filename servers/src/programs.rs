//! Finding the servers' programs and running them as somebody whom they accept.
//!
//! What lives here: the search, the user, one short run. What does not: what is run.
//! Invariant: PostgreSQL refuses to run as root, so there it runs as the user `postgres`; for
//! everybody else it runs as they are.

use std::collections::hash_map::RandomState;
use std::hash::{BuildHasher, Hasher};
use std::net::{Ipv4Addr, TcpListener};
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use crate::error::{Error, Result, While};

/// The user that Debian's packages make.
const OWNER: &str = "postgres";
/// Below the ports that Linux gives to outgoing connections, so that a server that is stopped for
/// a while finds its port free again.
const PORTS: std::ops::Range<u16> = 20_000..32_000;

/// A command that runs as the servers' user; its process id is the program's own.
pub(crate) fn as_owner(program: &Path) -> Command {
    if !rustix::process::geteuid().is_root() {
        return Command::new(program);
    }
    let mut command = Command::new("setpriv");
    command.args(["--reuid", OWNER, "--regid", OWNER, "--init-groups", "--"]).arg(program);
    command
}

/// Gives a file or folder to the servers' user.
pub(crate) fn give_to_owner(path: &Path) -> Result<()> {
    if !rustix::process::geteuid().is_root() {
        return Ok(());
    }
    finish("chown", Command::new("chown").arg("-R").arg(format!("{OWNER}:")).arg(path))?;
    Ok(())
}

/// A remark for a failure, if the servers' user can't get at a folder.
pub(crate) fn why_closed_to_owner(folder: &Path) -> String {
    let mut entering = as_owner(Path::new("test"));
    let entered = entering.arg("-x").arg(folder).current_dir("/").status();
    if entered.is_ok_and(|status| status.success()) {
        return String::new();
    }
    let parent = folder.parent().unwrap_or(folder);
    format!("\n{} is closed to the user that runs PostgreSQL; set TMPDIR", parent.display())
}

/// Runs a command to its end and returns what it printed.
pub(crate) fn finish(what: &str, command: &mut Command) -> Result<String> {
    finish_with(what, command, Stdio::null())
}

/// [`finish`] for a program that reads its input from here.
pub(crate) fn finish_with(what: &str, command: &mut Command, input: Stdio) -> Result<String> {
    let ran = command.stdin(input).output().during(|| format!("start {what}"))?;
    if ran.status.success() {
        return Ok(String::from_utf8_lossy(&ran.stdout).into_owned());
    }
    let output = [ran.stdout, ran.stderr].concat();
    Err(Error::failed(what, String::from_utf8_lossy(&output).trim()))
}

/// Where a program is, on the search path or where Debian keeps servers.
pub(crate) fn find(name: &str) -> Result<PathBuf> {
    let path = std::env::var_os("PATH").unwrap_or_default();
    let folders = std::env::split_paths(&path).chain(["/usr/sbin".into()]);
    let found = folders.map(|folder| folder.join(name)).find(|file| file.is_file());
    found.ok_or_else(|| Error::missing(name))
}

/// Where a virtual environment of Python is kept, by its name. The servers' user can read it.
pub(crate) fn environment(name: &str) -> PathBuf {
    let cache = if rustix::process::geteuid().is_root() {
        Some("/var/cache".into())
    } else {
        let home = || std::env::var_os("HOME").map(|home| Path::new(&home).join(".cache"));
        std::env::var_os("XDG_CACHE_HOME").map(PathBuf::from).or_else(home)
    };
    cache.unwrap_or_else(std::env::temp_dir).join("postrider").join(name)
}

/// The folders of an environment's packages: one for each version of Python, so one.
pub(crate) fn python_packages(environment: &Path) -> impl Iterator<Item = PathBuf> + use<> {
    let libraries = std::fs::read_dir(environment.join("lib"));
    libraries.into_iter().flatten().flatten().map(|python| python.path().join("site-packages"))
}

/// A number that no other process draws.
pub(crate) fn random() -> u64 {
    RandomState::new().build_hasher().finish()
}

/// A port on which nobody listens now.
pub(crate) fn free_port() -> Result<u16> {
    let span = u64::from(PORTS.end - PORTS.start);
    for _ in 0..1000 {
        let offset = u16::try_from(random() % span).expect("the span of the ports is a u16");
        let port = PORTS.start + offset;
        if TcpListener::bind((Ipv4Addr::LOCALHOST, port)).is_ok() {
            return Ok(port);
        }
    }
    Err(Error::failed("finding a free port", format!("{PORTS:?} are all taken")))
}
