//! The certificate of a server that offers TLS.
//!
//! What lives here: an authority for one server, and the server's certificate by it, both made by
//! `openssl`, which comes with Debian's PostgreSQL. What does not: a server's settings.
//! Invariant: the authority's key is gone when this returns; a certificate is good for two days.

use std::path::Path;
use std::process::Command;

use crate::error::{Result, While};
use crate::programs;

const KEY: [&str; 5] = ["-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes"];

/// Makes `server.crt` and `server.key` in `data`, and the authority's certificate at `authority`.
pub(crate) fn make(data: &Path, authority: &Path) -> Result<()> {
    let openssl = programs::find("openssl")?;
    let authority_key = authority.with_extension("key");
    let request = |subject: &str, key: &Path, certificate: &Path| {
        let mut command = Command::new(&openssl);
        command.args(["req", "-x509", "-days", "2", "-subj", subject]).args(KEY);
        command.arg("-keyout").arg(key).arg("-out").arg(certificate);
        command
    };
    let mut make_authority = request("/CN=Postrider tests", &authority_key, authority);
    programs::finish("openssl", make_authority.args(["-addext", "keyUsage=critical,keyCertSign"]))?;
    let (key, certificate) = (data.join("server.key"), data.join("server.crt"));
    let mut make_certificate = request("/CN=localhost", &key, &certificate);
    make_certificate.arg("-CA").arg(authority).arg("-CAkey").arg(&authority_key);
    make_certificate.args(["-addext", "subjectAltName=DNS:localhost,IP:127.0.0.1"]);
    make_certificate.args(["-addext", "basicConstraints=critical,CA:FALSE"]);
    programs::finish("openssl", &mut make_certificate)?;
    std::fs::remove_file(&authority_key).during(|| "remove the authority's key".to_owned())?;
    for file in [key, certificate] {
        programs::give_to_owner(&file)?;
    }
    Ok(())
}
