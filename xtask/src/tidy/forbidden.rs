//! What must stand nowhere in this repository, or nowhere in a build.
//!
//! What lives here: one machine's paths, download hosts, open ends without an issue, and crates
//! that would bring a second answer to a settled question. What does not: licences (`deny.toml`).
//! Invariant: the texts searched for are put together here, so that this file does not hold them.

use super::Finding;
use crate::workspace::TextFile;

/// Paths that exist on one machine only, and hosts that a mirror may replace.
const STRINGS: &[(&str, &str)] = &[
    (concat!("/wor", "k/"), "a path of one machine; name it relative to the repository"),
    (concat!("/roo", "t/"), "a path of one machine; use $HOME or a temporary folder"),
    (concat!("/home", "/"), "a path of one machine; use $HOME or a temporary folder"),
    (concat!("index.", "crates.io"), "a download host; name the registry's package alone"),
    (concat!("static.", "crates.io"), "a download host; name the registry's package alone"),
    (concat!("registry.", "npmjs.org"), "a download host; name the registry's package alone"),
    (concat!("deb.", "debian.org"), "a download host; name the registry's package alone"),
];

/// The registry as every lock file names it, wherever the crates really come from.
const REGISTRY: &str = "registry+https://github.com/rust-lang/crates.io-index";

/// Nothing that holds on one machine only.
pub(super) fn strings(file: &TextFile) -> Vec<Finding> {
    let mut findings = Vec::new();
    for (at, line) in file.text.lines().enumerate() {
        for (text, remedy) in STRINGS {
            if line.contains(text) {
                findings.push(Finding::new(&file.path, at + 1, "forbidden string", *remedy));
            }
        }
        let source = line.strip_prefix("source = ").filter(|_| file.path.ends_with("Cargo.lock"));
        if source.is_some_and(|source| source.trim_matches('"') != REGISTRY) {
            let remedy = "comes from elsewhere than crates.io; depend on a published version";
            findings.push(Finding::new(&file.path, at + 1, "source", remedy));
        }
    }
    findings
}

/// Whoever leaves something open says where it is being tracked.
pub(super) fn open_ends(file: &TextFile) -> Vec<Finding> {
    if file.path.ends_with(".md") {
        return Vec::new();
    }
    let marks = [concat!("TO", "DO"), concat!("FIX", "ME")];
    let open = file.text.lines().enumerate().filter(|(_, line)| {
        marks.iter().any(|mark| {
            line.split(mark).skip(1).any(|rest| {
                let number = rest.trim_start_matches(['(', ' ']).strip_prefix('#');
                !number.is_some_and(|text| text.starts_with(|c: char| c.is_ascii_digit()))
            })
        })
    });
    open.map(|(at, _)| {
        Finding::new(&file.path, at + 1, "open end", "do it, or name its issue, as in (#12)")
    })
    .collect()
}

/// Crates that bring a second answer to a settled question.
const CRATES: &[(&str, &str)] = &[
    ("ring", "rustls runs on aws-lc-rs alone; turn the feature off that brings it"),
    ("openssl", "TLS is rustls; turn the feature off that brings it"),
    ("native-tls", "TLS is rustls; turn the feature off that brings it"),
    ("chrono", "time is jiff inside and milliseconds at the seams; turn the feature off"),
];

/// Judges the output of `cargo tree`, one `name vVERSION` a line.
pub(super) fn crates(tree: &str) -> Vec<Finding> {
    let mut findings = Vec::new();
    for (name, remedy) in CRATES {
        let present = tree.lines().any(|line| line.split(' ').next() == Some(*name));
        if present {
            let remedy = format!("{name}: {remedy} (cargo tree --all-features -i {name})");
            findings.push(Finding::new("Cargo.toml", 1, "forbidden crate", remedy));
        }
    }
    findings
}

#[cfg(test)]
mod tests {
    use super::super::sample;
    use super::*;

    #[test]
    fn paths_of_one_machine_and_download_hosts_are_found_anywhere() {
        for (text, _) in STRINGS {
            let found = strings(&sample("docs/a.md", format!("fine\nsee {text}x\n")));
            assert_eq!(found.len(), 1, "{text}");
            assert_eq!(found[0].line, 2);
        }
        assert!(strings(&sample("docs/a.md", "target/debug, ~/.cache, $HOME/x")).is_empty());
    }

    #[test]
    fn a_lock_file_names_the_one_registry() {
        let own = format!("source = \"{REGISTRY}\"\n");
        assert!(strings(&sample("Cargo.lock", own)).is_empty());
        let git = "source = \"git+https://example.org/x\"\n";
        assert_eq!(strings(&sample("fuzz/Cargo.lock", git)).len(), 1);
    }

    #[test]
    fn an_open_end_needs_its_issue() {
        let mark = concat!("TO", "DO");
        assert_eq!(open_ends(&sample("a.rs", format!("// {mark}: later"))).len(), 1);
        assert_eq!(open_ends(&sample("a.rs", format!("// {mark} #x"))).len(), 1);
        assert!(open_ends(&sample("a.rs", format!("// {mark}(#12): later"))).is_empty());
    }

    #[test]
    fn a_second_tls_provider_is_found_and_a_longer_name_is_not_it() {
        assert_eq!(crates("bytes v1.0.0\nring v0.17.8 (*)\n").len(), 1);
        assert_eq!(crates("openssl v0.10.1\nchrono v0.4.0\nnative-tls v0.2.0\n").len(), 3);
        assert!(crates("ringbuf v0.4.0\nopenssl-probe v0.1.0\nchrono-tz v0.9.0\n").is_empty());
    }
}
