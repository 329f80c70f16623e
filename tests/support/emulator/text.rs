//! CUDA C++ as the host compiler takes it: without CUDA's headers, and with function calls in place of inline
//! assembly. The compiler is told to read the emulator's header first.

use kernels_cubecl::cuda_source::Launch;

/// The text of a launch for the host compiler. Lines keep their numbers.
pub(super) fn for_the_host(launch: &Launch) -> String {
    let without_headers: Vec<&str> =
        launch.text.lines().map(|line| if line.starts_with("#include") { "" } else { line }).collect();
    let kernel = numbered_barriers(&assembly_as_calls(&without_headers.join("\n")));
    let entry = &launch.entry;
    format!(
        "#line 1\n{kernel}\n\
         extern \"C\" int emulated_arguments() {{ return emulated_arity(&{entry}); }}\n\
         extern \"C\" void emulated_kernel(void** arguments) {{ emulated_call(&{entry}, arguments); }}\n"
    )
}

/// How a text writes a barrier of the cube.
pub(crate) const BARRIER: &str = "__syncthreads();";

/// Gives each barrier of the cube its number in the text.
fn numbered_barriers(text: &str) -> String {
    let mut parts = text.split(BARRIER);
    let first = parts.next().unwrap_or_default().to_owned();
    parts.enumerate().fold(first, |out, (n, part)| format!("{out}machine::sync_threads({n}, __LINE__);{part}"))
}

/// Replaces each `asm volatile("name operands;" : outputs : inputs);` by `ptx::name(operands);`, and `asm(...);` likewise.
fn assembly_as_calls(text: &str) -> String {
    const START: &str = "asm volatile(";
    let text: &str = &text.replace("asm(\"", "asm volatile(\"");
    let mut out = String::new();
    let mut rest = text;
    while let Some(at) = rest.find(START) {
        out.push_str(&rest[..at]);
        let statement = &rest[at + START.len()..];
        let end = statement.find(");\n").expect("an assembly statement ends");
        // The statement keeps its lines, or later lines would have other numbers.
        let lines = "\n".repeat(statement[..end].matches('\n').count());
        out.push_str(&format!("{};{lines}", call(&statement[..end])));
        rest = &statement[end + ");".len()..];
    }
    out + rest
}

/// The call for one assembly statement without its parentheses.
fn call(statement: &str) -> String {
    let mut template = String::new();
    let mut operands = Vec::new();
    let mut rest = statement.trim_start();
    // The template is one literal or several.
    while let Some(literal) = rest.strip_prefix('"') {
        let end = literal.find('"').expect("a string literal ends");
        template.push_str(&literal[..end].replace("\\n", " "));
        rest = literal[end + 1..].trim_start();
    }
    // Operands are `"constraint"(expression)`; a literal without parentheses is a clobber.
    while let Some(quote) = rest.find('"') {
        let constraint = &rest[quote + 1..];
        let after = &constraint[constraint.find('"').expect("a string literal ends") + 1..];
        rest = after;
        if let Some(expression) = after.trim_start().strip_prefix('(') {
            let end = closing(expression);
            operands.push(expression[..end].trim());
            rest = &expression[end + 1..];
        }
    }
    let template = template.trim().trim_end_matches(';');
    if template.starts_with('{') && template.contains(CLOCK) {
        return statements(template, &operands);
    }
    if template.starts_with('{') {
        // Another block of statements is named by its first instruction, and takes all operands.
        let mut words = template.split_whitespace();
        let name = words.find(|word| word.contains('.') && !word.starts_with('.')).expect("a block has an instruction");
        return format!("ptx::{}({})", function(name), operands.join(", "));
    }
    let (name, places) = template.split_once(char::is_whitespace).unwrap_or((template, ""));
    let arguments: Vec<&str> = places
        .split(',')
        .map(|place| place.trim_matches(|c: char| c.is_whitespace() || "[]{}%".contains(c)))
        // `_` is a result that nobody wants.
        .filter(|place| !place.is_empty() && *place != "_")
        .map(|place| operands[place.parse::<usize>().expect("an operand is a number")])
        .collect();
    format!("ptx::{}({})", function(name), arguments.join(", "))
}

/// How a block of statements reads the clock. Only such a block is translated statement by statement: it can end a launch.
const CLOCK: &str = "%%clock64";

/// The C++ of a block of statements: `.reg` declares registers, `name:` is a label, and `@P` in front of an instruction makes it
/// depend on a register.
fn statements(block: &str, operands: &[&str]) -> String {
    let mut out = String::from("{ ");
    for statement in block.trim_matches(['{', '}']).split(';') {
        let mut rest = statement.trim();
        if let Some((label, after)) = rest.split_once(": ").or_else(|| Some((rest.strip_suffix(':')?, ""))) {
            out.push_str(&format!("{label}:; "));
            rest = after.trim();
        }
        if let Some((register, guarded)) = rest.strip_prefix('@').and_then(|rest| rest.split_once(' ')) {
            out.push_str(&format!("if ({register}) "));
            rest = guarded;
        }
        let (name, places) = rest.split_once(' ').unwrap_or((rest, ""));
        match name {
            "" => {}
            ".reg" => {
                let (kind, names) = places.split_once(' ').expect("a register has a type");
                let kinds = [(".pred", "bool"), (".u32", "uint32_t"), (".u64", "uint64_t")];
                let (_, kind) = kinds.into_iter().find(|(ptx, _)| *ptx == kind).expect("a known type of registers");
                out.push_str(&format!("{kind} {names}; "));
            }
            "bra" => out.push_str(&format!("goto {places}; ")),
            _ => {
                let places = places.split(',').map(|place| place.trim_matches([' ', '[', ']']));
                let arguments: Vec<&str> = places
                    .map(|place| match place.strip_prefix('%') {
                        _ if place == CLOCK => "machine::clock()",
                        Some(number) => operands[number.parse::<usize>().expect("an operand is a number")],
                        None => place,
                    })
                    .collect();
                out.push_str(&format!("ptx::{}({}); ", function(name), arguments.join(", ")));
            }
        }
    }
    out + "}"
}

/// The function that stands for an instruction.
fn function(name: &str) -> String {
    name.replace("::", "_").replace('.', "_")
}

/// Where the parenthesis that is open at the beginning of `text` is closed.
fn closing(text: &str) -> usize {
    let mut depth = 1;
    for (at, c) in text.char_indices() {
        match c {
            '(' => depth += 1,
            ')' => depth -= 1,
            _ => {}
        }
        if depth == 0 {
            return at;
        }
    }
    panic!("a parenthesis is not closed: {text}")
}

#[test]
fn assembly_becomes_calls() {
    let text = "a;\n  asm volatile(\"cp.async.cg.shared::cta.global [%0], [%1], %2, %2;\\n\"\n   \
                :: \"r\"(f(x)), \"l\"(y), \"n\"(16) : \"memory\");\nb;\n";
    assert_eq!(assembly_as_calls(text), "a;\n  ptx::cp_async_cg_shared_cta_global(f(x), y, 16, 16);\n\nb;\n");
    let text = "asm volatile(\"fence.all;\" ::: \"memory\");\nasm volatile(\"arrive _, [%0, {%2, %1}];\" ::\"r\"(a), \"r\"(b), \"n\"(3));\n";
    assert_eq!(assembly_as_calls(text), "ptx::fence_all();\nptx::arrive(a, 3, b);\n");
    let text =
        "asm volatile(\"{ .reg .pred P; AGAIN: try.wait P, [%0], %1; @P bra DONE; DONE: }\" ::\"r\"(a), \"r\"(b));\n";
    assert_eq!(assembly_as_calls(text), "ptx::try_wait(a, b);\n");
    let text = "asm volatile(\"{ .reg .pred P; .reg .u64 start, time; ld.u32 now, [%0]; mov.u64 start, %%clock64; \"\n\
                \"AGAIN: xor.b32 now, now, %1; @P bra DONE; @P trap; bra AGAIN; DONE: }\" ::\"l\"(f(x)), \"r\"(y) : \"memory\");\n";
    let expected = "{ bool P; uint64_t start, time; ptx::ld_u32(now, f(x)); ptx::mov_u64(start, machine::clock()); \
                    AGAIN:; ptx::xor_b32(now, now, y); if (P) goto DONE; if (P) ptx::trap(); goto AGAIN; DONE:; };\n\n";
    assert_eq!(assembly_as_calls(text), expected);
}
