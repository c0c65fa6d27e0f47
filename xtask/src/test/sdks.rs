//! Microsoft's own clients of Azure Service Bus and Azure Cosmos DB, which tests drive.
//!
//! What lives here: installing them, each by its own installer. What does not: which versions, and
//! where they are kept, which `servers/` knows; what the tests do with them.
//! Invariant: what is installed is what the lock file, or the list of versions, says.

use std::path::Path;
use std::process::Command;

use anyhow::{Context, Result, bail};
use postrider_servers::{cosmos_sdk, servicebus_sdk};

use super::tools;
use crate::process;

/// What npm installs for one client, to the last hash.
type NpmFiles = [(&'static str, &'static str); 2];

const SERVICE_BUS: NpmFiles = [
    ("package.json", include_str!("../../../emulators/servicebus/tests/sdk/package.json")),
    (
        "package-lock.json",
        include_str!("../../../emulators/servicebus/tests/sdk/package-lock.json"),
    ),
];
const COSMOS: NpmFiles = [
    ("package.json", include_str!("../../../crates/stores/cosmos/tests/sdk/package.json")),
    (
        "package-lock.json",
        include_str!("../../../crates/stores/cosmos/tests/sdk/package-lock.json"),
    ),
];

/// Installs those that are missing, and returns their names.
pub(super) fn install() -> Result<Vec<&'static str>> {
    let mut done = Vec::new();
    for sdk in servicebus_sdk::Sdk::ALL {
        if sdk.program().is_ok() {
            continue;
        }
        match sdk {
            servicebus_sdk::Sdk::Python => {
                install_python_packages(&sdk.folder(), sdk.python_packages())?;
            }
            servicebus_sdk::Sdk::JavaScript => install_npm_packages(&sdk.folder(), &SERVICE_BUS)?,
        }
        sdk.program()?;
        done.push(sdk.package());
    }
    for sdk in cosmos_sdk::Sdk::ALL {
        if sdk.program().is_ok() {
            continue;
        }
        match sdk {
            cosmos_sdk::Sdk::Python => {
                install_python_packages(&sdk.folder(), sdk.python_packages())?;
            }
            cosmos_sdk::Sdk::JavaScript => install_npm_packages(&sdk.folder(), &COSMOS)?,
        }
        sdk.program()?;
        done.push(sdk.package());
    }
    Ok(done)
}

fn install_python_packages(folder: &Path, packages: &[&str]) -> Result<()> {
    tools::install_python_packages(folder, packages, "see why pip refuses it")
}

fn install_npm_packages(folder: &Path, files: &NpmFiles) -> Result<()> {
    std::fs::create_dir_all(folder).context("make a folder for npm")?;
    for (name, text) in files {
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
        for (package, folder, files) in [
            (
                servicebus_sdk::Sdk::JavaScript.package(),
                servicebus_sdk::Sdk::JavaScript.folder(),
                SERVICE_BUS,
            ),
            (cosmos_sdk::Sdk::JavaScript.package(), cosmos_sdk::Sdk::JavaScript.folder(), COSMOS),
        ] {
            let (name, version) = package.rsplit_once('@').expect("it has a version");
            for (file, text) in files {
                assert!(text.contains(&format!("\"{name}\": \"{version}\"")), "{file}");
                assert!(!text.contains("\"resolved\""), "{file}");
            }
            assert!(folder.to_string_lossy().ends_with(version));
        }
        for (package, folder, packages) in [
            (
                servicebus_sdk::Sdk::Python.package(),
                servicebus_sdk::Sdk::Python.folder(),
                servicebus_sdk::Sdk::Python.python_packages(),
            ),
            (
                cosmos_sdk::Sdk::Python.package(),
                cosmos_sdk::Sdk::Python.folder(),
                cosmos_sdk::Sdk::Python.python_packages(),
            ),
        ] {
            let (_, version) = package.split_once("==").expect("it has a version");
            assert!(folder.to_string_lossy().ends_with(version));
            assert_eq!(packages.first(), Some(&package));
        }
    }
}
