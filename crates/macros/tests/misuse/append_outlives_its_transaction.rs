use postrider::sqlite::{append, rusqlite::Connection};

fn later(work: impl FnOnce() + 'static) {
    work();
}

fn place_order(shop: &mut Connection) {
    let tx = shop.transaction().unwrap();
    later(move || {
        append(&tx, &[]).unwrap();
    });
}

fn main() {}
