//! Dead letters that one document can't hold.
//!
//! What lives here: the documents with the parts of a letter's content: written before their letter
//! and removed with it. What does not: the letter (`letters.rs`).
//! Invariant: a letter that names parts has all of them, whole, from the moment it is there; an
//! event that the container could hold never fails to become a letter.

use base64::Engine;
use base64::engine::general_purpose::STANDARD as BASE64;
use postrider_core::{Error, Result};
use serde::{Deserialize, Serialize};
use serde_json::json;

use crate::control::{Control, Kept, Write, id};
use crate::leases::Under;
use crate::letters::Letter;

const PART: &str = "part";
/// Most bytes of content in one document. In base64, and with all that stands beside it, a document
/// stays below the service's 2 MB.
pub(crate) const MAX_PART_BYTES: usize = 1_000_000;

/// A part of a letter's content, in base64.
#[derive(Debug, Serialize, Deserialize)]
struct Part {
    letter: String,
    place: u32,
    data: String,
}

fn part_id(letter: &str, place: u32) -> String {
    id(PART, &[letter.as_bytes(), &place.to_be_bytes()])
}

/// Writes the parts of a letter's content that are not there yet.
pub(crate) async fn write(
    control: &Control,
    under: &mut Under<'_>,
    letter: &str,
    content: &[u8],
) -> Result<()> {
    for (place, bytes) in (0..).zip(content.chunks(MAX_PART_BYTES)) {
        let id = part_id(letter, place);
        let part = Part { letter: letter.to_owned(), place, data: BASE64.encode(bytes) };
        loop {
            let write = match control.read::<Part>(&id).await? {
                Some(found) if found.body.data == part.data => break,
                Some(found) => Write::Replace(control.document(PART, &id, &part)?, found.etag),
                None => Write::Create(control.document(PART, &id, &part)?),
            };
            if under.write(vec![write]).await? {
                break;
            }
        }
    }
    Ok(())
}

/// The letter with its content, wherever that is.
pub(crate) async fn whole(control: &Control, kept: Kept<Letter>) -> Result<Kept<Letter>> {
    let Kept { body, etag, written_at } = kept;
    if body.parts == 0 {
        return Ok(Kept { body, etag, written_at });
    }
    let mut content = Vec::new();
    for place in 0..body.parts {
        let part = control.read::<Part>(&part_id(&body.id, place)).await?;
        let bytes = part.and_then(|part| BASE64.decode(part.body.data).ok());
        content.extend(bytes.ok_or_else(|| {
            Error::corrupt(format!(
                "part {place} of dead letter {} is missing or can't be read; discard the letter, \
                 or put the document {} back",
                body.number,
                part_id(&body.id, place)
            ))
        })?);
    }
    Ok(Kept { body: body.with_content(&content), etag, written_at })
}

/// The writes that remove the parts of a letter.
pub(crate) async fn removal(control: &Control, letter: &str, parts: u32) -> Result<Vec<Write>> {
    if parts == 0 {
        return Ok(Vec::new());
    }
    let of = [("@letter", json!(letter))];
    let found = control.texts(PART, "c.id", "AND c.letter = @letter", &of, usize::MAX).await?;
    Ok(found.into_iter().map(Write::Drop).collect())
}
