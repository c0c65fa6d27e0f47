use postrider::sqlite::{SqliteStore, append};

fn place_order(store: &SqliteStore) -> postrider::Result<()> {
    append(store, &[])?;
    Ok(())
}

fn main() {}
