use postrider::sqlite::{append, rusqlite::Transaction};

fn later<'tx>(tx: Transaction<'tx>) -> impl FnOnce() + 'tx {
    let tx = &tx;
    move || {
        append(tx, &[]).unwrap();
    }
}

fn main() {}
