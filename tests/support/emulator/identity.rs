//! The emulator recognizes a kernel that it has compiled before, although CubeCL writes its text differently in each run.

use std::collections::HashMap;

/// What the texts of one kernel have in common. CubeCL numbers temporaries through the whole process. It writes types,
/// declarations of variables, and arrays in shared memory with their offsets, in an order that differs from compilation to
/// compilation.
pub(super) fn identity(text: &str) -> String {
    const NAME: &str = "_tmp_";
    let (mut types, mut others, mut in_type) = (Vec::new(), String::new(), false);
    for line in text.lines() {
        if line.starts_with("// Shared ") {
            continue;
        }
        if let Some((array, _offset)) = line.split_once("dynamic_shared_mem[").filter(|_| line.contains("_cast<")) {
            types.push(array.to_owned());
            continue;
        }
        if is_declaration(line) {
            types.push(line.to_owned());
            continue;
        }
        if line.starts_with("struct __align__") {
            types.push(String::new());
            in_type = true;
        }
        match types.last_mut() {
            Some(last) if in_type => last.push_str(line),
            _ => others.extend([line, "\n"]),
        }
        in_type &= line != "};";
    }
    types.sort_unstable();
    let mut parts = others.split(NAME);
    let mut out = types.concat() + parts.next().unwrap_or_default();
    let mut numbers = HashMap::new();
    for part in parts {
        let digits = part.bytes().take_while(u8::is_ascii_digit).count();
        let next = numbers.len();
        let number = *numbers.entry(&part[..digits]).or_insert(next);
        out.push_str(&format!("{NAME}{number}{}", &part[digits..]));
    }
    out
}

/// Whether a line declares a variable that is assigned to later: `float l_mut_7;`.
fn is_declaration(line: &str) -> bool {
    let name = line.split_once(' ').and_then(|(_type, rest)| rest.strip_prefix("l_mut_")?.strip_suffix(';'));
    name.is_some_and(|number| number.bytes().all(|byte| byte.is_ascii_digit()))
}

#[test]
fn texts_of_one_kernel_are_the_same() {
    let types = ["struct __align__(4) a {\n  x;\n};\n", "struct __align__(8) b {\n};\n"];
    let text = |[one, other]: [&str; 2], n: usize| format!("{one}{other}f(_tmp_{n}, _tmp_{});\n_tmp_{n};\n", n + 5);
    assert_eq!(identity(&text(types, 3)), identity(&text([types[1], types[0]], 90)));
    assert_ne!(identity("f(_tmp_1, _tmp_2);"), identity("f(_tmp_1, _tmp_1);"));
    let array = |name: &str, at: usize| {
        format!("// Shared array size: 2, 4 bytes\nT *{name} = reinterpret_cast<T*>(&dynamic_shared_mem[{at}]);\n")
    };
    assert_eq!(identity(&(array("a", 0) + &array("b", 4))), identity(&(array("b", 0) + &array("a", 8))));
    assert_ne!(identity(&array("a", 0)), identity(&array("b", 0)));
    let (one, other) = ("float l_mut_7;\n", "uint32 l_mut_12;\n");
    let ended = |text: String| identity(&(text + "l_mut_7 = float(1.0);\n"));
    assert_eq!(ended(one.to_owned() + other), ended(other.to_owned() + one));
    assert_ne!(ended(one.to_owned() + other), ended(one.to_owned()));
}
