//! Microsoft's own clients of Azure Service Bus, which tests drive.
//!
//! What lives here: installing them, each by its own installer. What does not: which versions, and
//! where they are kept, which `servers/` knows; what the tests do with them (`emulators/`).
//! Invariant: what is installed is what the lock file, or the list of versions, says.

use std::path::Path;
use std::process::Command;

use anyhow::{Context, Result, bail};
use postrider_servers::servicebus_sdk::Sdk;

use super::tools;
use crate::process;

/// What npm installs, to the last hash.
const NPM_FILES: &[(&str, &str)] = &[
    ("package.json", include_str!("../../../emulators/servicebus/tests/sdk/package.json")),
    (
        "package-lock.json",
        include_str!("../../../emulators/servicebus/tests/sdk/package-lock.json"),
    ),
];

/// Installs those that are missing, and returns their names.
pub(super) fn install() -> Result<Vec<&'static str>> {
    let mut done = Vec::new();
    for sdk in Sdk::ALL {
        if sdk.program().is_ok() {
            continue;
        }
        let folder = sdk.folder();
        match sdk {
            Sdk::Python => {
                let packages = sdk.python_packages();
                tools::install_python_packages(&folder, packages, "see why pip refuses it")?;
            }
            Sdk::JavaScript => install_npm_packages(&folder)?,
        }
        sdk.program()?;
        done.push(sdk.package());
    }
    Ok(done)
}

fn install_npm_packages(folder: &Path) -> Result<()> {
    std::fs::create_dir_all(folder).context("make a folder for npm")?;
    for (name, text) in NPM_FILES {
        std::fs::write(folder.join(name), text).with_context(|| format!("write {name}"))?;
    }
    let mut npm = Command::new("npm");
    // No package's own script is run: none of these needs one.
    npm.args(["ci", "--ignore-scripts", "--no-audit", "--no-fund", "--omit=optional"]);
    let finished = process::run("npm ci", npm.current_dir(folder)).context("run npm")?;
    if !finished.status.success() {
        bail!("{}\nnpm ci failed", finished.output);
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_lock_file_and_the_folder_are_of_the_same_version_and_no_registry_is_named() {
        let (_, version) = Sdk::JavaScript.package().rsplit_once('@').expect("it has a version");
        for (name, text) in NPM_FILES {
            assert!(text.contains(&format!("\"@azure/service-bus\": \"{version}\"")), "{name}");
            assert!(!text.contains("\"resolved\""), "{name}");
        }
        assert!(Sdk::JavaScript.folder().to_string_lossy().ends_with(version));
        let (_, version) = Sdk::Python.package().split_once("==").expect("it has a version");
        assert!(Sdk::Python.folder().to_string_lossy().ends_with(version));
        assert_eq!(Sdk::Python.python_packages().first(), Some(&Sdk::Python.package()));
    }
}
