use postrider::sqlite::{append, rusqlite::Connection};

fn place_order(shop: &Connection) -> postrider::Result<()> {
    append(shop, &[])?;
    Ok(())
}

fn main() {}
