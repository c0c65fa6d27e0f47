//! `cargo xtask fuzz …`: the decoders of bytes from outside under a fuzzer.
//!
//! What lives here: the targets, their bounds, and what cargo-fuzz is called with. What does not:
//! what a target looks for (`fuzz/`, and the crate's own `fuzzing.rs`).
//! Invariant: a run that found something fails, and its input stays where the output says.

use std::path::Path;
use std::process::{Command, ExitCode};

use anyhow::{Context, Result, bail};

use crate::workspace::{Workspace, output};

const TARGETS: &[&str] = &["pgoutput", "frames", "emulator", "servicebus"];
/// Long enough for counts of two bytes to be full.
const INPUT_BYTES_MAX: u32 = 1 << 17;
/// All of the fuzzer's, and far more than any input could need.
const MEMORY_MIB_MAX: u32 = 512;
/// One piece of memory; a decoder that believed a length would ask for up to 4 GiB.
const PIECE_MIB_MAX: u32 = 64;
/// The library under the Service Bus sink asks for as much as a value says it has, before it looks
/// whether that came. The system gives what is written to, so this costs nothing but addresses.
const PIECE_OF_SERVICEBUS_MIB_MAX: u32 = 8 * 1024;
const SECONDS_FOR_AN_INPUT: u32 = 10;

/// What to fuzz, and how long.
#[derive(clap::Args)]
pub(crate) struct Args {
    /// For each target, in seconds.
    #[arg(long, default_value_t = 600)]
    seconds: u32,
    /// This target alone.
    #[arg(long, value_parser = TARGETS.to_vec())]
    target: Option<String>,
}

/// Runs the targets one after the other.
pub(crate) fn run(args: &Args) -> Result<ExitCode> {
    if args.seconds == 0 {
        bail!("--seconds 0 would never end; give 1 or more");
    }
    let workspace = Workspace::locate()?;
    if !nightly(&workspace.root).arg("--version").output().is_ok_and(|ran| ran.status.success()) {
        bail!(
            "a nightly compiler or cargo-fuzz is missing; run `rustup toolchain install nightly` \
             and `cargo install cargo-fuzz`"
        );
    }
    let folder = workspace.target()?.join("fuzz");
    let chosen = |target: &&&str| args.target.as_ref().is_none_or(|one| one == **target);
    // Not `cargo fuzz run`, which builds again when a file has changed in the meantime.
    let built = nightly(&workspace.root).args(["build", "--target-dir"]).arg(&folder).status();
    if !built.context("start cargo-fuzz")?.success() {
        bail!("the fuzz targets could not be built");
    }
    let programs = folder.join(host()?).join("release");
    for target in TARGETS.iter().filter(chosen) {
        let (corpus, found) = (folder.join("corpus").join(target), folder.join("found"));
        for made in [&corpus, &found] {
            std::fs::create_dir_all(made).context("make a folder for inputs")?;
        }
        let mut fuzz = Command::new(programs.join(target));
        fuzz.arg(&corpus).current_dir(&found);
        // What was freed is kept aside, 256 MiB of it by default, and would hide the figure.
        fuzz.env("ASAN_OPTIONS", "quarantine_size_mb=16");
        fuzz.arg(format!("-max_total_time={}", args.seconds));
        fuzz.arg(format!("-max_len={INPUT_BYTES_MAX}"));
        fuzz.arg(format!("-rss_limit_mb={MEMORY_MIB_MAX}"));
        let piece = match *target {
            "servicebus" => PIECE_OF_SERVICEBUS_MIB_MAX,
            _ => PIECE_MIB_MAX,
        };
        fuzz.arg(format!("-malloc_limit_mb={piece}"));
        fuzz.arg(format!("-timeout={SECONDS_FOR_AN_INPUT}"));
        fuzz.arg("-print_final_stats=1");
        if !fuzz.status().with_context(|| format!("start {target}"))?.success() {
            bail!("{target} found something; the input that did it lies in {}", found.display());
        }
    }
    Ok(ExitCode::SUCCESS)
}

/// The nightly compiler's own platform, which is a folder of what it builds.
fn host() -> Result<String> {
    let mut rustc = Command::new("rustc");
    let text = output(rustc.args(["+nightly", "-vV"]).env_remove("RUSTUP_TOOLCHAIN"))?;
    let line = text.lines().find_map(|line| line.strip_prefix("host: "));
    Ok(line.context("ask rustc for its platform")?.to_owned())
}

/// `cargo fuzz` by the nightly compiler. The one that runs this program is left aside.
fn nightly(root: &Path) -> Command {
    let mut command = Command::new("cargo");
    command.args(["+nightly", "fuzz"]).current_dir(root);
    for (name, _) in std::env::vars_os() {
        let text = name.to_string_lossy();
        if text == "CARGO" || text.starts_with("CARGO_PKG_") || text.starts_with("RUSTUP_TOOL") {
            command.env_remove(&name);
        }
    }
    command
}
